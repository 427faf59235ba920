//! The ranks of several processes: each is connected to rank 0, which passes on what all have sent. Whoever reaches the
//! port of rank 0 may be taken for a rank, as with NCCL.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs as _},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use aril::{group::ChannelError, model::TpRank};

use super::Link;
use crate::error::{Context, Result, bail};

/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// The most bytes that a rank sends at once, a bound against strangers.
const MAX_BYTES: u64 = 1 << 32;

pub(super) struct Sockets {
    tp: TpRank,
    /// Of rank 0: those of all others, by rank. Of another rank: that of rank 0.
    streams: Vec<TcpStream>,
    broken: Mutex<Option<ChannelError>>,
}

impl Sockets {
    /// Connects a rank with the others, which may start later or earlier.
    pub(super) fn connect(tp: TpRank, address: (&str, u16), limit: Duration) -> Result<Self> {
        let start = Instant::now();
        let is_late = || start.elapsed() >= limit;
        let mut streams: Vec<Option<TcpStream>> = Vec::new();
        if tp.rank() == 0 {
            let listener = TcpListener::bind(address).context(format_args!("{}:{}", address.0, address.1))?;
            listener.set_nonblocking(true)?;
            streams.resize_with(tp.size() - 1, || None);
            while let Some(missing) = streams.iter().position(Option::is_none) {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == ErrorKind::WouldBlock && !is_late() => {
                        thread::sleep(PAUSE);
                        continue;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        bail!("rank {} has not come within {limit:?}", missing + 1)
                    }
                    Err(error) => return Err(error.into()),
                };
                stream.set_nonblocking(false)?;
                let stream = limited(stream, limit)?;
                let [rank, size] = [read_number(&stream)?, read_number(&stream)?];
                let place = usize::try_from(rank)?.checked_sub(1).and_then(|place| streams.get_mut(place));
                match place {
                    Some(place @ None) if size == tp.size() as u64 => *place = Some(stream),
                    _ => bail!("a process came as rank {rank} of {size}"),
                }
            }
        } else {
            let stream = loop {
                let attempt = address.to_socket_addrs().and_then(|mut addresses| {
                    let address = addresses.next().ok_or_else(|| io::Error::other("the host has no address"))?;
                    TcpStream::connect_timeout(&address, limit)
                });
                match attempt {
                    Ok(stream) => break stream,
                    Err(_) if !is_late() => thread::sleep(PAUSE),
                    Err(error) => return Err(error).context(format_args!("{}:{}", address.0, address.1)),
                }
            };
            let mut stream = limited(stream, limit)?;
            stream.write_all(&[tp.rank() as u64, tp.size() as u64].map(u64::to_le_bytes).concat())?;
            streams.push(Some(stream));
        }
        Ok(Self { tp, streams: streams.into_iter().flatten().collect(), broken: Mutex::default() })
    }

    /// The rank at the other end of a stream.
    fn rank(&self, stream: usize) -> usize {
        if self.tp.rank() == 0 { stream + 1 } else { 0 }
    }

    /// Calls `f` with the streams, unless the group is broken. After an error, all streams are closed, so that every
    /// rank gets one.
    fn with<V>(
        &self,
        f: impl FnOnce() -> std::result::Result<V, (usize, io::Error)>,
    ) -> std::result::Result<V, ChannelError> {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(broken) = &*broken {
            return Err(broken.clone());
        }
        f().map_err(|(stream, error)| {
            let reason = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => "no answer within the time limit".to_owned(),
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                    "left the group".to_owned()
                }
                _ => error.to_string(),
            };
            for stream in &self.streams {
                // It may be closed.
                let _ = stream.shutdown(Shutdown::Both);
            }
            broken.insert(ChannelError { ranks: vec![self.rank(stream)], reason }).clone()
        })
    }
}

impl Link for Sockets {
    fn gather(&self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, ChannelError> {
        self.with(|| {
            if let (1.., [to_first]) = (self.tp.rank(), &self.streams[..]) {
                let exchange = || {
                    write(to_first, bytes)?;
                    (0..self.tp.size()).map(|_| read(to_first)).collect::<io::Result<_>>()
                };
                return exchange().map_err(|error| (0, error));
            }
            let mut of_ranks = vec![bytes.to_vec()];
            for (index, stream) in self.streams.iter().enumerate() {
                of_ranks.push(read(stream).map_err(|error| (index, error))?);
            }
            for (index, stream) in self.streams.iter().enumerate() {
                of_ranks.iter().try_for_each(|bytes| write(stream, bytes)).map_err(|error| (index, error))?;
            }
            Ok(of_ranks)
        })
    }

    fn check(&self) -> std::result::Result<(), ChannelError> {
        self.with(|| {
            let is_open = |stream: &TcpStream| {
                stream.set_nonblocking(true)?;
                let peeked = stream.peek(&mut [0]);
                stream.set_nonblocking(false)?;
                match peeked {
                    Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                    Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
                    _ => Ok(()),
                }
            };
            let mut streams = self.streams.iter().enumerate();
            streams.try_for_each(|(index, stream)| is_open(stream).map_err(|error| (index, error)))
        })
    }
}

/// A stream that waits for its other end up to `limit`.
fn limited(stream: TcpStream, limit: Duration) -> Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

fn write(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

fn read(stream: &TcpStream) -> io::Result<Vec<u8>> {
    let len = read_number(stream)?;
    if len > MAX_BYTES {
        return Err(io::Error::other(format!("a message of {len} bytes")));
    }
    let mut bytes = Vec::new();
    stream.take(len).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < len { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

fn read_number(mut stream: &TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
