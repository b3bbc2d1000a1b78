//! Signs of life: heartbeats to peers that would hear nothing otherwise, and the end of peers that
//! give none.

use super::Driver;
use crate::connection::OutgoingPayload;
use crate::options::ChannelOptions;
use gradlane_engine::ReadyRule;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{Codec, FrameFlags, FrameHeader, FrameKind};
use std::time::Duration;

impl Driver {
    /// Sends signs of life, and loses peers that give none.
    pub(super) fn watch_silence(&mut self) {
        if self.now < self.next_watch {
            return;
        }
        let silence = self.options.silence_timeout();
        // Who applies pushes one by one is needed, and gives signs of life, after its goodbye too.
        let serves = self.engine.plan().strategy.ready == ReadyRule::Each;
        let mut next = self.now + silence;
        for index in 0..self.links.len() {
            let rank = Rank(index as u32);
            let Some(link) = self.links[index].as_mut().filter(|link| link.open) else {
                continue;
            };
            if !link.said_goodbye || serves {
                if self.now >= link.last_sent + silence / 4 && link.connection.sender.is_empty() {
                    let header = heartbeat(&self.options);
                    let nothing = OutgoingPayload::Owned(Vec::new());
                    link.connection.sender.push(header, nothing, None);
                    link.last_sent = self.now;
                    self.dirty.push(rank);
                }
                next = next.min(link.last_sent.max(self.now) + silence / 4);
            }
            if !link.heard_goodbye || serves {
                // Until its first byte a peer may still be waiting for others to connect.
                let grace =
                    if link.heard { Duration::ZERO } else { self.options.connect_timeout() };
                let limit = link.last_received + silence + grace;
                if self.now >= limit {
                    let silent_s = self.now.since(link.last_received).as_secs_f64();
                    let reason = format!(
                        "silent for {silent_s:.1} s, so its machine or process stands still, or the \
                         network is cut (longer pauses of these: silence_timeout_s)"
                    );
                    self.lose(rank, &reason);
                } else {
                    next = next.min(limit);
                }
            }
        }
        // Never twice in one millisecond: the poller counts in these.
        self.next_watch = next.max(self.now + Duration::from_millis(1));
    }
}

fn heartbeat(options: &ChannelOptions) -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Heartbeat,
        codec: Codec::Raw,
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
        payload_crc: 0,
    }
}
