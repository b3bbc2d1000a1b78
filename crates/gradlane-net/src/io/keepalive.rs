//! Keepalive: heartbeats to peers that would hear nothing otherwise, and the loss of silent peers.

use super::frame_writer::{OutgoingFrame, OutgoingPayload};
use super::lane::Lane;
use crate::options::ChannelOptions;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use std::time::Duration;

impl Lane {
    /// Sends heartbeats to peers, and loses those that are silent.
    pub(super) fn check_keepalive(&mut self) {
        let core = &mut self.core;
        let now = core.now;
        let silence = core.options.silence_timeout();
        let is_async = core.is_async();
        let mut next = now + silence;
        let mut silent: Vec<(Rank, String)> = Vec::new();
        for (index, connection) in self.connections.iter_mut().enumerate() {
            let rank = Rank(index as u32);
            let (Some(connection), true) = (connection, core.is_open(rank)) else {
                continue;
            };
            let said_goodbye = core.peers[index].as_ref().is_some_and(|peer| peer.said_goodbye);
            if !said_goodbye || is_async {
                if now >= connection.last_sent + silence / 4 && connection.writer.is_empty() {
                    connection.last_sent = now;
                    let frame = heartbeat(&core.options);
                    core.enqueue(rank, frame);
                }
                next = next.min(connection.last_sent.max(now) + silence / 4);
            }
            if !connection.heard_goodbye || is_async {
                let last = core.peers[index].as_ref().and_then(|peer| peer.last_received);
                let last = last.or(core.connected_at);
                // Until its first byte a peer may still be waiting for other ranks to connect.
                let grace =
                    if last.is_some() { Duration::ZERO } else { core.options.connect_timeout() };
                let last = last.unwrap_or(Time::ZERO);
                let limit = last + silence + grace;
                let due = if now < limit { Err(limit) } else { core.confirm_silence(rank) };
                if let Err(later) = due {
                    next = next.min(later);
                } else {
                    let silent_s = now.since(last).as_secs_f64();
                    let own = Rank(core.options.rank);
                    let (first, second) = (own.min(rank), own.max(rank));
                    let reason = format!(
                        "silent for {silent_s:.1} s, so its machine or process stands still, or the \
                         link between {first} and {second} is cut (longer pauses of these: \
                         silence_timeout_s)"
                    );
                    silent.push((rank, reason));
                }
            }
        }
        for (rank, reason) in silent {
            self.lose(rank, &reason);
        }
        // At most once a millisecond, the resolution of the poller.
        self.next_keepalive_check = next.max(now + Duration::from_millis(1));
    }
}

fn heartbeat(options: &ChannelOptions) -> OutgoingFrame {
    let header = FrameHeader {
        kind: FrameKind::Heartbeat,
        form: PayloadForm::Raw,
        flags: FrameFlags::NONE,
        step: Step(0),
        generation: options.generation,
        plan_version: 0,
        tensor: TensorId(0),
        slice: SliceId(0),
        priority: Priority(0),
        sender: Rank(options.rank),
        offset: 0,
        length: 0,
        block_bytes: 0,
        hop: 0,
        payload_checksum: 0,
    };
    OutgoingFrame::new(header, OutgoingPayload::Owned(Vec::new()), false)
}
