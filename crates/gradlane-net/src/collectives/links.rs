//! The connections of a group and its state: what arrives goes to the state, its frames go out.

use super::error::GroupErrorKind;
use super::peers::Sent;
use super::state::GroupState;
use super::work::Work;
use crate::io::{Fault, Flushed, FrameReader, FrameWriter};
use crate::sys::poller::{Interest, Poller};
use crate::sys::socket::Socket;
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

/// Bytes read from one peer before the next one's turn.
const READ_BUDGET: usize = 4 << 20;

/// A connection to one peer.
#[derive(Debug)]
pub(super) struct Link {
    socket: Arc<dyn Socket>,
    reader: FrameReader,
    writer: FrameWriter,
    /// What ends with each frame of the writer.
    sent: VecDeque<Sent>,
    waits_for_room: bool,
    /// Whether the stream has ended or failed.
    is_over: bool,
}

impl Link {
    pub(super) fn new(socket: Arc<dyn Socket>, reader: FrameReader, writer: FrameWriter) -> Link {
        let sent = VecDeque::new();
        Link { socket, reader, writer, sent, waits_for_room: false, is_over: false }
    }
}

/// The connections by rank, and the state.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) state: GroupState,
    links: Vec<Option<Link>>,
    /// Whether the memory of a group that has ended is released.
    is_released: bool,
}

impl Links {
    /// Watches all connections; the key of a report is the rank.
    pub(super) fn new(
        state: GroupState,
        links: Vec<Option<Link>>,
        poller: &Poller,
    ) -> io::Result<Links> {
        for (rank, link) in links.iter().enumerate() {
            if let Some(link) = link {
                link.socket.watch(poller, rank as u64, Interest::Begin)?;
            }
        }
        Ok(Links { state, links, is_released: false })
    }

    /// Reads what has come from a peer.
    pub(super) fn receive(&mut self, peer: u32, poller: &Poller, now: Instant) {
        let Some(Some(link)) = self.links.get_mut(peer as usize) else {
            return;
        };
        if link.is_over {
            return;
        }
        if self.state.failure().is_some() {
            // Nothing of it is used, but a peer that still sends could not read this rank's reason.
            let mut bytes = [0; 64 << 10];
            let read = link.socket.receive(&mut [IoSliceMut::new(&mut bytes)]);
            let is_over = match read {
                Ok(count) => count == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            };
            if is_over {
                link.end(peer, poller);
            }
            return;
        }
        let mut sink = self.state.sink(peer);
        let (count, outcome) = link.reader.receive(&*link.socket, READ_BUDGET, &mut sink);
        if count > 0 {
            self.state.peers.get_mut(peer).heard = now;
        }
        if let Err(fault) = outcome {
            link.end(peer, poller);
            if !self.state.has_left(peer) {
                self.state.lost(peer, &fault);
            }
        }
    }

    /// Hands frames to the kernel until nothing is left that it takes, and ends works.
    pub(super) fn flush(&mut self, poller: &Poller) -> Vec<Arc<Work>> {
        let mut goes_on = true;
        while std::mem::take(&mut goes_on) {
            self.release_if_over();
            for peer in 0..self.links.len() {
                let Some(link) = &mut self.links[peer] else {
                    continue;
                };
                let outbox = &mut self.state.peers.get_mut(peer as u32).outbox;
                if link.is_over {
                    outbox.clear();
                    continue;
                }
                if outbox.is_empty() && link.writer.is_empty() {
                    continue;
                }
                let (mut frames, tags): (VecDeque<_>, Vec<_>) = outbox.drain(..).unzip();
                link.sent.extend(tags);
                link.writer.append(&mut frames);
                let mut sent = Vec::new();
                let flushed = link.flush(peer as u32, poller, &mut sent);
                for it in sent {
                    self.state.sent(peer as u32, it);
                }
                if let Err(fault) = flushed {
                    link.end(peer as u32, poller);
                    self.state.lost(peer as u32, &fault);
                }
            }
            // What has ended may have begun something else.
            goes_on = self.links.iter().enumerate().any(|(peer, link)| {
                let waits = link.as_ref().is_some_and(|it| !it.is_over && !it.waits_for_room);
                waits && !self.state.peers.get(peer as u32).outbox.is_empty()
            });
            goes_on |= self.state.failure().is_some() && !self.is_released;
        }
        self.finish_works()
    }

    fn finish_works(&mut self) -> Vec<Arc<Work>> {
        let ended = self.state.take_ended();
        let watched = ended.into_iter().filter_map(|(work, result)| {
            let is_watched = work.finish(result);
            is_watched.then_some(work)
        });
        watched.collect()
    }

    /// Ends all borrows of memory once the group has ended, and then its works.
    fn release_if_over(&mut self) {
        let Some(failure) = self.state.failure() else {
            return;
        };
        if std::mem::replace(&mut self.is_released, true) {
            return;
        }
        let keeps_frames = failure.kind == GroupErrorKind::Closed && self.state.is_idle();
        for link in self.links.iter_mut().flatten() {
            link.reader.release_memory();
            if !keeps_frames {
                link.writer.release_memory();
                link.sent.clear();
            }
        }
        self.state.release();
    }

    /// Whether no call runs, and all bytes are with the kernel.
    pub(super) fn is_idle(&self) -> bool {
        self.state.is_idle() && self.is_flushed()
    }

    /// Whether all bytes are with the kernel.
    pub(super) fn is_flushed(&self) -> bool {
        let links = self.links.iter().enumerate();
        links.filter_map(|(peer, link)| Some((peer, link.as_ref()?))).all(|(peer, link)| {
            let outbox = &self.state.peers.get(peer as u32).outbox;
            link.is_over || link.writer.is_empty() && outbox.is_empty()
        })
    }

    /// Tells all peers that nothing follows.
    pub(super) fn end_streams(&self) {
        for link in self.links.iter().flatten().filter(|it| !it.is_over) {
            // A connection that is gone needs no end.
            let _ = link.socket.end_stream();
        }
    }

    /// Whether all streams have ended.
    pub(super) fn is_over(&self) -> bool {
        self.links.iter().flatten().all(|link| link.is_over)
    }
}

impl Link {
    fn flush(&mut self, peer: u32, poller: &Poller, sent: &mut Vec<Sent>) -> Result<(), Fault> {
        let fault = |error: io::Error| Fault::Lost(format!("connection failed: {error}"));
        let (tags, mut total) = (&mut self.sent, 0);
        let flushed = self.writer.flush(&*self.socket, &mut total, |_, _| {
            sent.extend(tags.pop_front());
        });
        let waits = flushed.map_err(fault)? == Flushed::Blocked;
        if waits != self.waits_for_room {
            let interest = if waits { Interest::Writable } else { Interest::Readable };
            self.socket.watch(poller, u64::from(peer), interest).map_err(fault)?;
            self.waits_for_room = waits;
        }
        Ok(())
    }

    fn end(&mut self, peer: u32, poller: &Poller) {
        self.is_over = true;
        // A descriptor that cannot be watched is not watched any more.
        let _ = self.socket.watch(poller, u64::from(peer), Interest::End);
    }
}
