//! Messages to other ranks, and contributions that are encoded before they are sent.

use super::Cx;
use crate::api::{BufferRef, QueueStats, Transmit};
use crate::rank_set::RankSet;
use crate::transmit::{Body, Message, OrderKey, PendingEncode};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm, MAX_FRAME_BYTES};

impl Cx {
    pub(crate) fn control_header(&self, kind: FrameKind) -> FrameHeader {
        FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: self.step(),
            generation: self.generation,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: self.rank,
            offset: 0,
            length: 0,
            block_bytes: 0,
            hop: 0,
            payload_checksum: 0,
        }
    }

    pub(crate) fn slice_header(
        &self,
        kind: FrameKind,
        step: Step,
        slice: SliceId,
        priority: Priority,
    ) -> FrameHeader {
        let tensor = self.plan.slice(slice).tensor;
        let plan_version = self.priorities.version(step);
        FrameHeader { step, plan_version, tensor, slice, priority, ..self.control_header(kind) }
    }

    /// A result, or word that there is none.
    pub(crate) fn result_message(
        &self,
        slice: SliceId,
        step: Step,
        (buffer, form): (Option<BufferRef>, PayloadForm),
        priority: Priority,
    ) -> Message {
        let mut header = self.slice_header(FrameKind::Broadcast, step, slice, priority);
        header.form = form;
        let body = match buffer {
            Some(buffer) => Body::Region(buffer.whole()),
            None => {
                header.flags = FrameFlags::ABSENT;
                Body::Empty
            }
        };
        Message { header, body }
    }

    /// Key of a slice's message or job in the strategy's order.
    pub(crate) fn slice_key(&mut self, step: Step, priority: Priority, slice: SliceId) -> OrderKey {
        self.keys.slice(step, priority, self.plan.slice(slice).tensor, slice)
    }

    /// Key of a reduced slice's message. Where the norm of all gradients is awaited, means go after
    /// what has still to be reduced: until then nobody can use them.
    pub(crate) fn result_key(
        &mut self,
        step: Step,
        priority: Priority,
        slice: SliceId,
    ) -> OrderKey {
        let key = self.slice_key(step, priority, slice);
        if self.squares.are_measured(step) {
            key.deferred()
        } else {
            key
        }
    }

    /// Queues a message to one rank.
    pub(crate) fn send(&mut self, to: Rank, key: OrderKey, message: Message) {
        self.tx.push(to, key, message);
    }

    /// Queues a message to several ranks as one entry.
    pub(crate) fn send_shared(&mut self, to: RankSet, key: OrderKey, message: Message) {
        self.tx.push_shared(to, key, message);
    }

    /// Queues a control message, before every slice.
    pub(crate) fn send_control(&mut self, to: RankSet, header: FrameHeader, body: Body) {
        let key = self.keys.control();
        self.tx.push_shared(to, key, Message { header, body });
    }

    /// Queues a control message to one rank.
    pub(crate) fn send_control_to(&mut self, to: Rank, header: FrameHeader, body: Body) {
        let key = self.keys.control();
        self.tx.push(to, key, Message { header, body });
    }
}

/// Contributions.
impl Cx {
    /// Queues this rank's contribution for its encoding.
    pub(crate) fn queue_encode(&mut self, to: Rank, key: OrderKey, pending: PendingEncode) {
        self.encodes.push(to, key, pending);
    }

    /// An encoded contribution is queued for a rank.
    pub(crate) fn note_encoded(
        &mut self,
        pending: PendingEncode,
        key: OrderKey,
        to: Rank,
        buffer: BufferRef,
    ) {
        self.encodes.note_encoded(pending, key, to, buffer);
    }

    /// An encoded contribution is dropped.
    pub(crate) fn drop_encoded(&mut self, key: OrderKey, to: Rank, buffer: BufferRef) {
        self.encodes.drop_encoded(key, to);
        self.release(buffer);
    }

    /// An encoded contribution, if it was one, is read no longer; whether it was one.
    pub(crate) fn encoded_sent(&mut self, slice: SliceId, step: Step) -> bool {
        let buffer = self.encodes.note_sent(slice, step);
        buffer.into_iter().for_each(|buffer| self.release(buffer));
        buffer.is_some()
    }

    /// This rank's contribution to a slice is read no longer, or goes nowhere.
    pub(crate) fn contribution_sent(&mut self, slice: SliceId, step: Step) {
        if !self.encoded_sent(slice, step) {
            self.push_sent(slice);
        }
    }

    /// Takes back contributions to a step of which nothing was handed out.
    pub(crate) fn withdraw(&mut self, step: Step) {
        for slice in self.tx.withdraw_pushes(step) {
            self.contribution_sent(slice, step);
        }
        for slice in self.encodes.withdraw(step) {
            self.push_sent(slice);
        }
    }
}

/// Sockets.
impl Cx {
    pub(crate) fn set_writable(&mut self, peer: Rank, writable: bool) {
        self.tx.set_writable(peer, writable);
    }

    pub(crate) fn set_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        self.tx.set_frame_bytes(peer, frame_bytes.clamp(1, MAX_FRAME_BYTES));
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.tx.poll()
    }

    /// The kernel has a frame that was handed out.
    pub(crate) fn frame_sent(&mut self, peer: Rank, header: &FrameHeader) {
        self.tx.sent(peer, header.length);
    }

    /// Nobody reads the memory of a frame any more.
    pub(crate) fn frame_read(&mut self, peer: Rank) {
        self.tx.read(peer);
    }

    pub(crate) fn queue_stats(&self) -> QueueStats {
        QueueStats { peers: self.tx.queue_stats(), jobs: self.jobs.queued() as u64 }
    }

    /// Whether every message is with the kernel, and read no longer.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.tx.is_idle()
    }

    /// Whether no job is queued or under way.
    pub(crate) fn has_done_all(&self) -> bool {
        self.jobs.is_idle()
    }

    /// Whether no contribution waits for its encoding or, encoded, for its socket.
    pub(crate) fn has_encoded_all(&self) -> bool {
        self.encodes.is_idle()
    }

    /// Drops all that is queued: the session ends.
    pub(crate) fn clear(&mut self) {
        self.tx.clear();
        self.jobs.clear();
        self.encodes.clear();
    }
}
