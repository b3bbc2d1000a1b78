//! The kind of a frame, its flags and the form of its payload.

macro_rules! wire_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $value:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant = $value),+ }

        impl $name {
            /// Every value, in the order of their codes.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The value with this code on the wire.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<$name> {
                match code { $($value => Some($name::$variant),)+ _ => None }
            }

            /// The code on the wire.
            #[must_use]
            pub const fn code(self) -> u8 { self as u8 }
        }
    };
}

wire_enum! {
    /// The purpose of a frame.
    FrameKind {
        /// Piece of a gradient slice, from a worker to the slice's owner.
        Push = 1,
        /// Piece of an aggregated slice, from its owner to a worker.
        Broadcast = 2,
        /// The owner has the aggregated slice; the worker may pull (pull rules with a notice).
        Notify = 3,
        /// The worker asks the owner for the aggregated slice.
        Pull = 4,
        /// A new priority vector from rank 0. Payload: `u64` first step, then one `i32` a tensor.
        PlanSwitch = 5,
        /// The sender holds the priority vector of this plan version.
        PlanSwitchAck = 6,
        /// A keepalive.
        Heartbeat = 7,
        /// The sender has finished in good order after the step in the header and will send no more.
        Goodbye = 8,
        /// The sender gives up. Payload: the reason in UTF-8.
        Abort = 9,
        /// The sender has heard nothing from a rank for too long. Payload: the rank as `u32`.
        Suspect = 10,
        /// The squares of all means that the sender has reduced in the header's step, added up. Payload: as
        /// `SquareSum` of `gradlane-units` writes it.
        SquareSum = 11,
        /// A message of the ranks that agree on the next membership, after some were lost.
        Membership = 12,
        /// The results that the sender has of the header's step, after ranks were lost. Payload: the
        /// membership's generation as `u32`, then two bits a slice.
        Holdings = 13,
        /// The sender has taken up a membership and takes slices again. Payload: its generation as `u32`.
        Resumed = 14,
        /// How a server that trains nothing handles the header's step: the optimizer's settings, or state
        /// to send or to take. Before the sender's pushes of that step, which are refused without.
        ServerCommand = 15,
        /// Piece of a slice's sum so far, from a rank to the next one of the ring. `hop` counts the
        /// contributions in it.
        RingReduce = 16,
        /// Piece of a slice's mean, from a rank to the next one of the ring. `hop` counts the
        /// ranks that it has reached with this one.
        RingBroadcast = 17,
        /// Piece of a rank's block, from that rank to each other one. Its offset counts from the
        /// block's start.
        Block = 18,
        /// The scales of a slice's buckets so far, from a rank to the next one of the ring. `hop` counts the
        /// ranks whose values they cover.
        RingScale = 19,
        /// The sender has begun the header's step, to rank 0; with `ABSENT` it takes no part in it.
        StepBegun = 32,
        /// All gradients of the sender in the header's step are queued, to rank 0.
        GradientsQueued = 33,
        /// Ranks whose gradients count in the header's step, from rank 0. Payload: one bit a rank, in as few
        /// bytes as hold them: rank r is bit r % 8, from the lowest, of byte r / 8.
        Contributors = 34,
        /// A frame of a group of ranks that calls collectives: its fields have meanings of their own.
        Collective = 48,
    }
}

impl FrameKind {
    /// The name in timelines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FrameKind::Push => "push",
            FrameKind::Broadcast => "broadcast",
            FrameKind::Notify => "notify",
            FrameKind::Pull => "pull",
            FrameKind::PlanSwitch => "planswitch",
            FrameKind::PlanSwitchAck => "planswitchack",
            FrameKind::Heartbeat => "heartbeat",
            FrameKind::Goodbye => "goodbye",
            FrameKind::Abort => "abort",
            FrameKind::Suspect => "suspect",
            FrameKind::SquareSum => "squaresum",
            FrameKind::Membership => "membership",
            FrameKind::Holdings => "holdings",
            FrameKind::Resumed => "resumed",
            FrameKind::ServerCommand => "servercommand",
            FrameKind::RingReduce => "ring-reduce",
            FrameKind::RingBroadcast => "ring-gather",
            FrameKind::Block => "block",
            FrameKind::RingScale => "ring-scale",
            FrameKind::StepBegun => "stepbegun",
            FrameKind::GradientsQueued => "gradientsqueued",
            FrameKind::Contributors => "contributors",
            FrameKind::Collective => "collective",
        }
    }

    /// Whether frames of this kind are about the session, and not about a slice.
    #[must_use]
    pub const fn is_control(self) -> bool {
        use FrameKind::{Block, Broadcast, Notify, Pull, Push};
        !matches!(self, Push | Broadcast | Notify | Pull | Block) && !self.is_ring()
    }

    /// Whether frames of this kind say which ranks are in a step, and how far they are.
    #[must_use]
    pub const fn is_about_steps(self) -> bool {
        use FrameKind::{Contributors, GradientsQueued, StepBegun};
        matches!(self, StepBegun | GradientsQueued | Contributors)
    }

    /// Whether frames of this kind go round a ring, and count their hops.
    #[must_use]
    pub const fn is_ring(self) -> bool {
        matches!(self, FrameKind::RingReduce | FrameKind::RingBroadcast | FrameKind::RingScale)
    }
}

wire_enum! {
    /// The form of a slice's payload.
    PayloadForm {
        /// The bytes of the elements themselves, in the tensor's dtype.
        Raw = 0,
        /// In the codec that the plan has for the tensor.
        Encoded = 1,
    }
}

/// Bits that qualify a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameFlags(pub u8);

impl FrameFlags {
    /// No flag.
    pub const NONE: FrameFlags = FrameFlags(0);
    /// The slice ends with this frame.
    pub const LAST: FrameFlags = FrameFlags(1);
    /// The sender has no gradient for this slice in this step; the frame has no payload.
    pub const ABSENT: FrameFlags = FrameFlags(2);
    /// No rank may be left out of the step that the sender has begun.
    pub const BARRIER: FrameFlags = FrameFlags(4);
    const KNOWN: u8 = 7;

    /// Whether all bits of `other` are set here.
    #[must_use]
    pub const fn contains(self, other: FrameFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The flags of both.
    #[must_use]
    pub const fn with(self, other: FrameFlags) -> FrameFlags {
        FrameFlags(self.0 | other.0)
    }

    /// Whether a bit is set that this version does not know.
    #[must_use]
    pub const fn has_unknown(self) -> bool {
        self.0 & !FrameFlags::KNOWN != 0
    }
}
