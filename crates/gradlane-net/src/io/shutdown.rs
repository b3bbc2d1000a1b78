//! The end of a session, on the thread of the first lane alone.
//!
//! The borrows of application memory end first; only then does the application learn of the end.
//! After a failure the other ranks are told the reason in every lane, for at most a second: whichever lane of
//! theirs ends first knows it.

use super::core::{Connection, Core};
use super::lane::Lane;
use crate::channel::shared::{SessionOutcome, Shared, StopCause};
use crate::error::ChannelFailure;
use crate::sys::lock;
use crate::sys::poller::Interest;
use crate::sys::socket::Socket;
use gradlane_engine::{Failure, Input};
use gradlane_units::Rank;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for sending the reason and receiving the others' last bytes.
const LINGER: Duration = Duration::from_secs(1);

/// A lane whose thread has stopped.
#[derive(Debug)]
struct EndedLane {
    core: Core,
    /// Connections on which bytes can still arrive.
    open: Vec<(Rank, Connection)>,
}

impl EndedLane {
    fn new(lane: Lane) -> EndedLane {
        let Lane { core, connections, .. } = lane;
        let open = connections
            .into_iter()
            .enumerate()
            .filter_map(|(index, connection)| Some((Rank(index as u32), connection?)))
            .filter(|(rank, _)| core.is_open(*rank))
            .collect();
        EndedLane { core, open }
    }

    /// Lets no job and no frame that arrives touch memory from now on.
    fn stop(&mut self) {
        self.core.jobs.stop();
        for (_, connection) in &mut self.open {
            connection.reader.release_memory();
        }
        *lock(&self.core.inbox().journal) = self.core.engine.take_journal();
    }

    fn release_memory(&mut self) {
        for (rank, connection) in &mut self.open {
            self.core.take_chosen(*rank, connection);
            for dropped in connection.writer.release_memory() {
                self.core.copied(*rank, dropped);
            }
        }
        for (rank, _) in &self.open {
            self.core.engine.tell(Input::Writable(*rank, true));
        }
    }

    /// Sends the engine's last frames, which give the reason.
    fn send_abort_reasons(&mut self) {
        let core = &mut self.core;
        while let Some(transmit) = core.engine.poll_transmit() {
            core.stage(transmit);
        }
        // A peer whose socket fails cannot be told.
        self.open.retain_mut(|(rank, connection)| {
            core.take_chosen(*rank, connection);
            let sent = |header: &_, is_engines| {
                if is_engines {
                    core.copied(*rank, *header);
                }
            };
            connection.writer.flush(&*connection.socket, &mut 0, sent).is_ok()
        });
    }

    /// Has one poller watch the connections, each under a number of its own.
    fn watch_by(&self, shared: &Shared) {
        let own = &self.core.inbox().poller;
        for (rank, connection) in &self.open {
            let (socket, key) = (&connection.socket, u64::from(rank.0));
            // A socket that is gone needs no change, and one that cannot be watched is polled by the timeout.
            let _ = socket.watch(own, key, Interest::End);
            let _ = socket.watch(&shared.lanes[0].poller, key, Interest::Begin);
        }
    }

    /// Sends, reads and drops what it can.
    fn linger(&mut self, shared: &Shared, shut: &mut Vec<(usize, Rank)>) {
        self.send_abort_reasons();
        let lane = self.core.lane;
        self.open.retain(|(rank, connection)| {
            if connection.writer.is_empty() && !shut.contains(&(lane, *rank)) {
                shut.push((lane, *rank));
                // A peer that has closed needs no end of stream.
                let _ = connection.socket.end_stream();
            }
            let goes_on = discard(&*connection.socket);
            if !goes_on {
                // The socket is closed in a moment; an error changes nothing.
                let poller = &shared.lanes[0].poller;
                let _ = connection.socket.watch(poller, u64::from(rank.0), Interest::End);
            }
            goes_on
        });
    }
}

/// A session whose lanes have stopped.
#[derive(Debug)]
pub(super) struct SessionShutdown {
    lanes: Vec<EndedLane>,
}

impl SessionShutdown {
    /// Takes the state that the lanes leave behind.
    pub(super) fn new(lanes: Vec<Lane>) -> SessionShutdown {
        SessionShutdown { lanes: lanes.into_iter().map(EndedLane::new).collect() }
    }

    /// Ends the session for the application and the other ranks.
    pub(super) fn run(mut self) {
        let Some(shared) = self.lanes.first().map(|lane| Arc::clone(&lane.core.shared)) else {
            return;
        };
        self.lanes.iter_mut().for_each(EndedLane::stop);
        match shared.stop.get() {
            None => {
                for (_, connection) in self.lanes.iter().flat_map(|lane| &lane.open) {
                    // A peer that has closed needs no end of stream.
                    let _ = connection.socket.end_stream();
                }
                shared.end(SessionOutcome::Closed);
            }
            Some(StopCause::Failed(failure)) => {
                for lane in &mut self.lanes {
                    lane.release_memory();
                    lane.core.engine.tell(Input::EndAs(failure.clone()));
                    lane.send_abort_reasons();
                }
                shared.end(SessionOutcome::Failed(channel_failure(failure)));
                self.linger(&shared, Instant::now() + LINGER);
            }
            Some(StopCause::Panicked(text)) => {
                // An engine may be in any state: peers only see their connections close.
                drop(self);
                shared.end_by_panic(text);
            }
        }
    }

    /// Sends the rest and reads until the others have closed too: closing with unread bytes would
    /// destroy bytes that they have not read yet.
    fn linger(&mut self, shared: &Shared, deadline: Instant) {
        let mut reports = Vec::new();
        let mut shut = Vec::new();
        // One poller takes all connections over. Readiness to send is polled by the timeout below:
        // reported all the time, it would keep this thread busy.
        self.lanes.iter().for_each(|lane| lane.watch_by(shared));
        loop {
            self.lanes.iter_mut().for_each(|lane| lane.linger(shared, &mut shut));
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.lanes.iter().all(|lane| lane.open.is_empty()) {
                return;
            }
            let nap = Some(left.min(Duration::from_millis(20)));
            let poller = &shared.lanes[0].poller;
            if poller.wait(nap, || true, &mut reports).is_err() {
                return;
            }
        }
    }
}

/// Reads and drops what has arrived. Returns `false` at the end of the stream.
fn discard(socket: &dyn Socket) -> bool {
    let mut room = [0_u8; 16 << 10];
    loop {
        match socket.receive(&mut [IoSliceMut::new(&mut room)]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}

fn channel_failure(failure: &Failure) -> ChannelFailure {
    ChannelFailure {
        message: failure.to_string(),
        last_complete: failure.last_complete,
        peer: failure.peer,
        timed_out: failure.timed_out,
    }
}
