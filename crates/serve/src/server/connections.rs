//! HTTP/1.1 connections, none of which waits for its client without an end.
//!
//! A head arrives within [`HEAD`], which is how long an idle connection stays open, too. From then on a request has
//! `--request-seconds`: its deadline ends the wait for its body, for its tokens, and for a client that does not read
//! its answer.

use std::{
    convert::Infallible,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, response::Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};
use tower_service::Service as _;

use super::access::Arrival;

/// The longest wait for the head of a request.
const HEAD: Duration = Duration::from_secs(30);
/// How long the end of the server waits for a connection that has had no request, or for the body of one, because it
/// may be on its way.
pub(super) const IDLE: Duration = Duration::from_secs(1);
/// How long nothing is accepted after a failure, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stopped`, and then until the last request has been answered. Each request has an [`Arrival`] as an
/// extension.
pub(super) async fn serve(listener: TcpListener, app: Router, time: Duration, mut stopped: watch::Receiver<bool>) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD.min(time));
    let mut connections = JoinSet::new();
    let until_stopped = stopped.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            // Without a sender, the server has been dropped.
            _ = stopped.wait_for(|is_stopped| *is_stopped) => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let peer = peer.ip().to_canonical();
                connections.spawn(connection(stream, peer, http.clone(), app.clone(), time, until_stopped.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves a connection. What goes wrong ends it.
async fn connection(
    stream: TcpStream,
    peer: IpAddr,
    http: http1::Builder,
    app: Router,
    time: Duration,
    mut stopped: watch::Receiver<bool>,
) {
    // Without it, small events wait for each other. A connection that has ended says so soon.
    let _ = stream.set_nodelay(true);
    let now = Instant::now();
    let progress = Arc::new(Progress { deadline: Mutex::new(now + time), is_used: AtomicBool::new(false) });
    let io = Timed { stream, progress: Arc::clone(&progress), end: Box::pin(sleep_until(now)) };
    let ending = stopped.clone();
    let service = service_fn(|request| {
        answer(request, app.clone(), Arrival { deadline: progress.begin(time), peer, ending: ending.clone() })
    });
    let mut served = std::pin::pin!(http.serve_connection(TokioIo::new(io), service));
    tokio::select! {
        _ = &mut served => return,
        _ = stopped.wait_for(|is_stopped| *is_stopped) => served.as_mut().graceful_shutdown(),
    }
    let is_used = || progress.is_used.load(Ordering::Relaxed);
    if !is_used() && (timeout(IDLE, &mut served).await.is_ok() || !is_used()) {
        return;
    }
    // It ends with its last answer, once its client has all of it. Its errors are those of its client.
    let _ = served.await;
}

async fn answer(request: hyper::Request<Incoming>, mut app: Router, arrival: Arrival) -> Result<Response, Infallible> {
    let mut request: Request = request.map(Body::new);
    request.extensions_mut().insert(arrival);
    app.call(request).await
}

/// What a connection does.
struct Progress {
    /// That of the last request.
    deadline: Mutex<Instant>,
    /// Whether it has had a request.
    is_used: AtomicBool,
}

impl Progress {
    fn deadline(&self) -> Instant {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request, which has this time.
    fn begin(&self, time: Duration) -> Instant {
        let deadline = Instant::now() + time;
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
        self.is_used.store(true, Ordering::Relaxed);
        deadline
    }
}

/// A stream that refuses to wait for its reader after the deadline.
struct Timed {
    stream: TcpStream,
    progress: Arc<Progress>,
    end: Pin<Box<Sleep>>,
}

impl Timed {
    fn or_late<V>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<V>>) -> Poll<io::Result<V>> {
        if written.is_ready() {
            return written;
        }
        let deadline = self.progress.deadline();
        if self.end.deadline() != deadline {
            self.end.as_mut().reset(deadline);
        }
        ready!(self.end.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Timed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.or_late(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.or_late(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// More than what sockets hold.
    const BYTES: usize = 16 << 20;
    const TIME: Duration = Duration::from_secs(3);

    /// Reads an answer with a body of so many bytes, and returns how many arrive.
    async fn read(stream: &mut TcpStream, bytes: usize) -> usize {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).await.expect("a head arrives");
            head.push(byte[0]);
        }
        let mut body = Vec::new();
        stream.take(bytes as u64).read_to_end(&mut body).await.map_or(0, |_| body.len())
    }

    /// Each request of a connection has its own time for a client that reads late.
    #[tokio::test]
    async fn a_later_request_has_as_much_time() {
        let app = Router::new().route("/", get(|| async { "small" })).route("/large", get(|| async { vec![0; BYTES] }));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
        let address = listener.local_addr().expect("it has an address");
        let (_running, stopped) = watch::channel(false);
        tokio::spawn(serve(listener, app, TIME, stopped));
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        for (path, bytes) in [("/", 5), ("/", 5), ("/large", BYTES)] {
            stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.expect("it is read");
            // Three of these take longer than one request may.
            sleep(TIME * 2 / 5).await;
            assert_eq!(read(&mut stream, bytes).await, bytes);
        }
    }
}
