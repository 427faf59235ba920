//! A channel on sockets, with rank 0 in the middle, to show what an engine needs for one.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use aril::{
    group::{ChannelError, Group, GroupError, Message, Phase, Ranks},
    model::TpRank,
};

use crate::world::{World, each, refused};

struct Sockets {
    tp: TpRank,
    /// Of rank 0: those of all others, by rank. Of another rank: that of rank 0.
    streams: Vec<TcpStream>,
}

impl Sockets {
    fn group(size: usize, time_limit: Duration) -> Vec<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let limited = |stream: TcpStream| {
            stream.set_read_timeout(Some(time_limit)).unwrap();
            stream
        };
        let tp = |rank| TpRank::new(rank, size).unwrap();
        let mut ranks = vec![Self { tp: tp(0), streams: Vec::new() }];
        for rank in 1..size {
            let stream = limited(TcpStream::connect(address).unwrap());
            ranks[0].streams.push(limited(listener.accept().unwrap().0));
            ranks.push(Self { tp: tp(rank), streams: vec![stream] });
        }
        ranks
    }

    /// The bytes of `count` messages from a stream. `rank` is at its other end.
    fn read(mut stream: &TcpStream, rank: usize, count: usize) -> Result<Vec<Message>, ChannelError> {
        let mut messages = vec![bytemuck::Zeroable::zeroed(); count];
        let read = stream.read_exact(bytemuck::cast_slice_mut(&mut messages));
        read.map_err(|error| ChannelError { ranks: vec![rank], reason: error.to_string() })?;
        Ok(messages)
    }

    fn write(mut stream: &TcpStream, rank: usize, messages: &[Message]) -> Result<(), ChannelError> {
        let written = stream.write_all(bytemuck::cast_slice(messages));
        written.map_err(|error| ChannelError { ranks: vec![rank], reason: error.to_string() })
    }
}

impl Ranks for Sockets {
    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        if let (1.., [to_first]) = (self.tp.rank(), &self.streams[..]) {
            Self::write(to_first, 0, &[*message])?;
            return Self::read(to_first, 0, self.tp.size());
        }
        let mut messages = vec![*message];
        for (stream, rank) in self.streams.iter().zip(1..) {
            messages.extend(Self::read(stream, rank, 1)?);
        }
        self.streams.iter().zip(1..).try_for_each(|(stream, rank)| Self::write(stream, rank, &messages))?;
        Ok(messages)
    }
}

const SLOT: usize = 1;

#[test]
fn a_group_on_sockets_loads_all_or_nothing() {
    let world = World::new(4);
    let tables = world.serving();
    let [good, bad] = [false, true].map(|bad| world.adapter(|rank| if bad && rank == 3 { f32::NAN } else { 9.0 }));
    each(Sockets::group(4, Duration::from_secs(60)), |rank, ranks| {
        let mut group = Group::new(ranks, tables[rank].clone()).unwrap();
        assert_eq!(group.free_slot().unwrap(), 0);
        assert_eq!(refused(&group.load(SLOT, 1, || Ok(&bad)).unwrap_err()), [(3, Phase::Fill)]);
        assert_eq!(world.delta(&tables[rank], SLOT), 7.0);
        group.load(SLOT, 2, || Ok(&good)).unwrap();
        assert_eq!(world.delta(&tables[rank], SLOT), 9.0);
    });
}

/// The ranks learn of it one after the other. None loads.
#[test]
fn a_rank_that_closes_its_socket() {
    let world = World::new(3);
    let (tables, adapter) = (world.serving(), world.adapter(|_| 9.0));
    each(Sockets::group(3, Duration::from_secs(60)), |rank, ranks| {
        let mut group = Group::new(ranks, tables[rank].clone()).unwrap();
        if rank == 1 {
            return;
        }
        assert!(matches!(group.load(SLOT, 1, || Ok(&adapter)), Err(GroupError::Channel(_))));
        assert_eq!(world.delta(&tables[rank], SLOT), 7.0);
    });
}
