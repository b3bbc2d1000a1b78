//! The last moments of a session, on the I/O thread.
//!
//! Memory of the application is let go of first; only then is anybody told that the session is
//! over. After a failure the other ranks are told why for at most a second.

use crate::driver::{Driver, Ending};
use crate::error::ChannelFailure;
use crate::ready::lock;
use crate::shared::Ended;
use crate::syscall::{EpollEvents, Scatter};
use gradlane_engine::Failure;
use gradlane_units::Rank;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Longest time for telling the others and for letting their last bytes come.
const LINGER: Duration = Duration::from_secs(1);

impl Driver {
    /// Ends the session. Afterwards the driver is of no further use.
    pub(crate) fn conclude(&mut self, ending: Ending) {
        self.works.stop();
        *lock(&self.shared.journal) = self.engine.take_journal();
        match ending {
            Ending::Closed => {
                for link in self.links.iter().flatten().filter(|link| link.open) {
                    // A peer that has closed already needs no end of stream.
                    let _ = link.connection.socket.get().shutdown(Shutdown::Write);
                }
                self.shared.end(Ended::Closed);
            }
            Ending::Failed(failure) => {
                self.let_go_of_memory();
                self.send_reasons();
                self.shared.end(Ended::Failed(channel_failure(&failure)));
                self.linger(Instant::now() + LINGER);
            }
        }
    }

    fn let_go_of_memory(&mut self) {
        for link in self.links.iter_mut().flatten() {
            for dropped in link.connection.sender.let_go_of_memory() {
                self.engine.handle_sent(&dropped);
            }
        }
        let open: Vec<Rank> = self.open_ranks();
        for rank in open {
            self.engine.handle_writable(rank, true);
        }
    }

    fn open_ranks(&self) -> Vec<Rank> {
        let links = self.links.iter().enumerate();
        let open = links.filter(|(_, link)| link.as_ref().is_some_and(|link| link.open));
        open.map(|(index, _)| Rank(index as u32)).collect()
    }

    /// Stages and sends what the engine has left to say: the reason.
    fn send_reasons(&mut self) {
        while let Some(transmit) = self.engine.poll_transmit() {
            self.stage(transmit);
        }
        for rank in self.open_ranks() {
            self.flush_last(rank);
        }
    }

    fn flush_last(&mut self, rank: Rank) {
        let engine = &mut self.engine;
        if let Some(Some(link)) = self.links.get_mut(rank.index()) {
            let result = link.connection.flush(|_, transmit| {
                if let Some(transmit) = transmit {
                    engine.handle_sent(&transmit);
                }
            });
            // Who cannot be told any more is not told.
            link.open &= result.is_ok();
        }
    }

    /// Sends the rest and reads until the others have closed too: closing with unread bytes would
    /// destroy what they have not read yet.
    fn linger(&mut self, deadline: Instant) {
        let mut events = EpollEvents::new();
        let mut reports = Vec::new();
        let mut shut = vec![false; self.links.len()];
        for (rank, link) in self.links.iter().enumerate() {
            if let Some(link) = link.as_ref().filter(|link| link.open) {
                // Readiness to send is looked at now and then below; reported all the time, it
                // would keep this thread busy. A socket that is gone needs no change.
                let socket = link.connection.socket.as_fd();
                let _ = self.shared.poller.modify(socket, rank as u64, false);
            }
        }
        loop {
            self.send_reasons();
            for (link, shut) in self.links.iter_mut().zip(&mut shut) {
                let Some(link) = link.as_mut().filter(|link| link.open) else {
                    continue;
                };
                if link.connection.sender.is_empty() && !*shut {
                    *shut = true;
                    // A peer that has closed already needs no end of stream.
                    let _ = link.connection.socket.get().shutdown(Shutdown::Write);
                }
                link.open = discard(link.connection.socket.as_fd());
                if !link.open {
                    // The socket is closed in a moment; an error changes nothing.
                    let _ = self.shared.poller.delete(link.connection.socket.as_fd());
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.open_ranks().is_empty() {
                return;
            }
            let nap = Some(left.min(Duration::from_millis(20)));
            if self.shared.poller.wait(&mut events, nap, || true, &mut reports).is_err() {
                return;
            }
        }
    }
}

/// Reads and forgets what has come; `false` at the end of the stream.
fn discard(socket: BorrowedFd<'_>) -> bool {
    let mut room = [0_u8; 16 << 10];
    loop {
        let mut scatter = Scatter::new();
        scatter.push_room(&mut room);
        match scatter.receive(socket) {
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
