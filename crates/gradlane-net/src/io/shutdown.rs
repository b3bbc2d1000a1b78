//! The end of a session, on the first I/O thread alone.
//!
//! The borrows of application memory end first; only then does the application learn of the end.
//! After a failure the other ranks are told the reason, for at most a second.

use super::connection::{Connection, Connections};
use super::core::Core;
use super::driver::ShutdownCause;
use crate::channel::shared::{SessionOutcome, Shared};
use crate::error::ChannelFailure;
use crate::sys::lock;
use crate::sys::poller::Interest;
use crate::sys::socket::Socket;
use crate::sys::syscall::EpollEvents;
use gradlane_engine::Failure;
use gradlane_units::Rank;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for sending the reason and receiving the others' last bytes.
const LINGER: Duration = Duration::from_secs(1);

/// A session whose I/O threads have stopped.
#[derive(Debug)]
pub(super) struct SessionShutdown {
    core: Core,
    /// Connections on which bytes can still arrive.
    open: Vec<(Rank, Connection)>,
}

impl SessionShutdown {
    /// Takes the state that the I/O threads leave behind.
    pub(super) fn new(core: Core, connections: Connections) -> SessionShutdown {
        let open = connections
            .into_iter()
            .enumerate()
            .filter_map(|(index, connection)| Some((Rank(index as u32), connection?)))
            .filter(|(rank, _)| core.is_open(*rank))
            .collect();
        SessionShutdown { core, open }
    }

    /// Ends the session for the application and the other ranks.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.core.shared);
        self.core.jobs.stop();
        for (_, connection) in &mut self.open {
            connection.reader.release_memory();
        }
        *lock(&shared.journal) = self.core.engine.take_journal();
        match self.core.take_shutdown() {
            ShutdownCause::Closed => {
                for (_, connection) in &self.open {
                    // A peer that has closed needs no end of stream.
                    let _ = connection.socket.end_stream();
                }
                shared.end(SessionOutcome::Closed);
            }
            ShutdownCause::Failed(failure) => {
                self.release_memory();
                self.send_abort_reasons();
                shared.end(SessionOutcome::Failed(channel_failure(&failure)));
                self.linger(&shared, Instant::now() + LINGER);
            }
            ShutdownCause::Panicked(text) => {
                // The engine may be in any state: peers only see their connections close.
                drop(self);
                shared.end_by_panic(&text);
            }
        }
    }

    fn release_memory(&mut self) {
        for (rank, connection) in &mut self.open {
            self.core.take_chosen(*rank, connection);
            for dropped in connection.writer.release_memory() {
                self.core.engine.handle_sent(&dropped);
            }
        }
        for (rank, _) in &self.open {
            self.core.engine.handle_writable(*rank, true);
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
            let sent = |_: &_, transmit: Option<_>| {
                if let Some(transmit) = transmit {
                    core.engine.handle_sent(&transmit);
                }
            };
            connection.writer.flush(&*connection.socket, &mut 0, sent).is_ok()
        });
    }

    /// Sends the rest and reads until the others have closed too: closing with unread bytes would
    /// destroy bytes that they have not read yet.
    fn linger(&mut self, shared: &Shared, deadline: Instant) {
        let mut events = EpollEvents::new();
        let mut reports = Vec::new();
        let mut shut = Vec::new();
        // One poller takes all connections over. Readiness to send is polled by the timeout below:
        // reported all the time, it would keep this thread busy.
        let poller = &shared.pollers[0];
        for (rank, connection) in &self.open {
            let (socket, key) = (&connection.socket, u64::from(rank.0));
            for former in &shared.pollers {
                // Only one of them knows the socket, and a socket that is gone needs no change.
                let _ = socket.watch(former, key, Interest::End);
            }
            // A socket that cannot be watched is polled by the timeout below.
            let _ = socket.watch(poller, key, Interest::Begin);
        }
        loop {
            self.send_abort_reasons();
            self.open.retain(|(rank, connection)| {
                if connection.writer.is_empty() && !shut.contains(rank) {
                    shut.push(*rank);
                    // A peer that has closed needs no end of stream.
                    let _ = connection.socket.end_stream();
                }
                let goes_on = discard(&*connection.socket);
                if !goes_on {
                    // The socket is closed in a moment; an error changes nothing.
                    let _ = connection.socket.watch(poller, u64::from(rank.0), Interest::End);
                }
                goes_on
            });
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.open.is_empty() {
                return;
            }
            let nap = Some(left.min(Duration::from_millis(20)));
            if poller.wait(&mut events, nap, || true, &mut reports).is_err() {
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
