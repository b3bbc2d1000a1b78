//! Starts the lanes of a rank with their connections and waits for them.

use super::core::{Connection, Core, Peer};
use super::lane::Lane;
use super::shutdown::SessionShutdown;
use crate::channel::shared::{Command, Shared};
use crate::connect::FrameSeals;
use crate::flow::{ConnectionFlow, Ends};
use crate::options::ChannelOptions;
use crate::sys::poller::Interest;
use crate::sys::socket::Socket;
use gradlane_engine::{Input, Plan};
use gradlane_units::Rank;
use std::io;
use std::sync::Arc;

/// A connection to a peer.
#[derive(Debug)]
pub(crate) struct PeerLink {
    pub(crate) socket: Arc<dyn Socket>,
    /// `None` where frames are not sealed.
    pub(crate) seals: Option<FrameSeals>,
}

/// The lanes of a rank, before they run.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) lanes: Vec<Lane>,
}

impl Driver {
    /// Makes the lanes with all connections (`links`, by lane and rank), before step 0. `is_local` tells
    /// whether all peers are on this machine, where ports are not paced.
    pub(crate) fn new(
        options: &ChannelOptions,
        plan: &Plan,
        links: Vec<Vec<Option<PeerLink>>>,
        is_local: bool,
        shared: &Arc<Shared>,
    ) -> io::Result<Driver> {
        let sent_to = plan.peers_sent_to(Rank(options.rank)) as usize;
        let ends = Ends { own: sent_to, busier: plan.peers_at_busier_end() as usize };
        let paced = options.pacing && sent_to > 1 && !is_local;
        let lane = |(lane, links): (usize, Vec<Option<PeerLink>>)| {
            let paced_peers = paced.then_some(sent_to);
            let mut core = Core::new(lane, options.clone(), paced_peers, Arc::clone(shared))?;
            let mut connections = Vec::with_capacity(links.len());
            for (rank, link) in links.into_iter().enumerate() {
                let Some(PeerLink { socket, seals }) = link else {
                    core.peers.push(None);
                    connections.push(None);
                    continue;
                };
                socket.watch(&shared.lanes[lane].poller, rank as u64, Interest::Begin)?;
                core.engine.tell(Input::Writable(Rank(rank as u32), true));
                let flow = ConnectionFlow::new(&*socket, options, ends)?;
                core.peers.push(Some(Peer::new(Arc::clone(&socket))));
                connections.push(Some(Connection::new(socket, seals, flow)));
            }
            Ok(Lane::new(core, connections))
        };
        let lanes: io::Result<_> = links.into_iter().enumerate().map(lane).collect();
        Ok(Driver { lanes: lanes? })
    }

    /// Runs the session until its end, also the exchange of reasons after a failure, on this thread and
    /// one for each further lane.
    pub(crate) fn run(self) {
        let mut lanes = self.lanes.into_iter();
        let ended = std::thread::scope(|scope| {
            let first = lanes.next();
            let others: Vec<_> = lanes
                .filter_map(|lane| {
                    let shared = Arc::clone(&lane.shared);
                    let builder = std::thread::Builder::new().name("gradlane-io".to_owned());
                    let spawned = builder.spawn_scoped(scope, move || lane.run());
                    let refused = |error| {
                        let reason = format!("cannot start the thread of a lane: {error}");
                        shared.tell_first(Command::Abort(reason));
                    };
                    spawned.map_err(refused).ok()
                })
                .collect();
            let mut ended: Vec<Lane> = first.map(Lane::run).into_iter().collect();
            // Their loops are guarded: the threads themselves do not panic.
            ended.extend(others.into_iter().filter_map(|thread| thread.join().ok()));
            ended
        });
        SessionShutdown::new(ended).run();
    }
}
