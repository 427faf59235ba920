//! The server's command. README.md in this folder is the manual.

use std::process::ExitCode;

use aril_serve::{Options, log, start};
use clap::Parser as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let ended = match log::start() {
        Ok(()) => run(options).await,
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = &ended {
        tracing::error!("{error}");
    }
    log::end();
    if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run(options: Options) -> Result<(), String> {
    // Before the first request can be answered.
    let mut signals = Signals::new().map_err(|error| format!("cannot wait for signals: {error}"))?;
    let server = tokio::select! {
        started = start(options) => started?,
        () = signals.next() => leave("ended by a signal before it served"),
    };
    signals.next().await;
    tracing::info!("ending: requests that run are finished, unless a second signal comes");
    tokio::select! {
        ended = server.shut_down() => ended,
        () = signals.next() => leave("ended by a second signal"),
    }
}

/// Ends the process without the threads that load the model, or the engine's, which may be in a step.
fn leave(why: &str) -> ! {
    tracing::warn!("{why}");
    log::end();
    std::process::exit(1)
}

/// SIGINT and SIGTERM.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next one.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
