//! The log on standard error: an event is one line of printable characters and bounded length.
//!
//! A thread of its own writes it. Nothing waits for standard error and nothing fails by it: if it cannot be written (a
//! full disk, a closed pipe) or nobody reads it, lines are lost, and their number is logged later.

use std::{
    any::Any,
    collections::VecDeque,
    io::{self, Write},
    panic,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tracing_subscriber::EnvFilter;

use crate::error::shown;

/// Lines that wait to be written.
const MAX_LINES: usize = 1024;
/// How long the end of the process waits for lines to be written.
const END: Duration = Duration::from_secs(1);

static LOG: Log =
    Log { lines: Mutex::new(Lines { waiting: VecDeque::new(), lost: 0, is_writing: false }), changed: Condvar::new() };

struct Log {
    lines: Mutex<Lines>,
    changed: Condvar,
}

struct Lines {
    waiting: VecDeque<String>,
    /// Lines that found no room since the last one that was written.
    lost: usize,
    is_writing: bool,
}

impl Log {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        // Nothing panics while it is locked.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self) {
        let mut lines = self.lines();
        loop {
            let line = match lines.waiting.pop_front() {
                Some(line) => line,
                None if lines.lost > 0 => {
                    format!("{} lines of the log are lost, for which it had no room", std::mem::take(&mut lines.lost))
                }
                None => {
                    lines = self.changed.wait(lines).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
            };
            lines.is_writing = true;
            drop(lines);
            // There is nobody left to be told that it fails.
            let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
            lines = self.lines();
            lines.is_writing = false;
            self.changed.notify_all();
        }
    }
}

/// Takes what is written at once as one line.
struct Line;

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = shown(String::from_utf8_lossy(bytes).trim_end());
        let mut lines = LOG.lines();
        if lines.waiting.len() < MAX_LINES {
            lines.waiting.push_back(line);
        } else {
            lines.lost += 1;
        }
        LOG.changed.notify_all();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts to log the process's events, panics among them. `RUST_LOG` filters them.
///
/// # Errors
/// That of the system, if no thread can be started.
pub fn start() -> io::Result<()> {
    thread::Builder::new().name("log".into()).spawn(|| LOG.write_all())?;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Line);
    log.with_ansi(false).log_internal_errors(false).init();
    panic::set_hook(Box::new(|info| {
        let (thread, at) = (thread::current(), info.location().map(ToString::to_string));
        tracing::error!(thread = thread.name(), at, why = written(info.payload()), "a thread has panicked");
    }));
    Ok(())
}

/// What a panic says, if the program's text has it as it is. A message that is put together may quote what a user has
/// sent.
fn written(payload: &(dyn Any + Send)) -> Option<&'static str> {
    payload.downcast_ref::<&'static str>().copied()
}

/// Waits until everything is written, but not for long.
pub fn end() {
    let is_left = |lines: &mut Lines| lines.is_writing || !lines.waiting.is_empty() || lines.lost > 0;
    // What is left after that time is lost.
    drop(LOG.changed.wait_timeout_while(LOG.lines(), END, is_left));
}

#[cfg(test)]
mod tests {
    use super::written;

    /// The text that a user has sent is in none of what these say.
    #[test]
    #[expect(clippy::panic, clippy::unwrap_used, reason = "it is about panics")]
    fn a_panic_quotes_no_user() {
        let says = |run: fn(&str)| {
            let text = String::from("s\u{e9}cret");
            let ended = std::panic::catch_unwind(move || run(&text));
            ended.map_err(|payload| written(&*payload)).expect_err("it panics")
        };
        assert_eq!(says(|_| panic!("an order is missing")), Some("an order is missing"));
        assert!(says(|text| drop(text.get(99..).unwrap().to_owned())).is_some_and(|why| why.contains("None")));
        assert_eq!(says(|text| panic!("{text}")), None);
        assert_eq!(says(|text| drop(text[..2].to_owned())), None);
        assert_eq!(says(|text| drop(text.parse::<u32>().map_err(|_| text.to_owned()).unwrap().to_string())), None);
        assert_eq!(says(|text| std::panic::panic_any(text.to_owned())), None);
    }
}
