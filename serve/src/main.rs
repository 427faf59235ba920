//! The server's command. README.md in this folder is the manual.

use std::process::ExitCode;

use aril_serve::{Options, start};
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let ended = match start(Options::parse()).await {
        Ok(server) => {
            told_to_end().await;
            tracing::info!("ending");
            server.shut_down().await
        }
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        tracing::error!("{error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Waits for SIGINT or SIGTERM.
async fn told_to_end() {
    use tokio::signal::unix::{SignalKind, signal};

    match signal(SignalKind::terminate()) {
        Ok(mut terminated) => {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated.recv() => {}
            }
        }
        Err(error) => tracing::error!(%error, "cannot wait for signals"),
    }
}
