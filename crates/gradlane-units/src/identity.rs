//! Identities: rank, step, tensor, slice and priority.

use core::fmt;
use serde::{Deserialize, Serialize};

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The identity as an index into a table.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, " {}"), self.0)
            }
        }
    };
}

identity!(
    /// One process of the job, numbered from 0 as in `torch.distributed`.
    Rank(u32),
    "rank"
);
identity!(
    /// One training iteration. Step 0 broadcasts rank 0's initial values; training starts at step 1.
    Step(u64),
    "step"
);
identity!(
    /// One parameter and its gradient, numbered in `named_parameters()` order.
    TensorId(u32),
    "tensor"
);
identity!(
    /// One slice, numbered over all tensors of a plan: slices of a tensor are consecutive.
    SliceId(u32),
    "slice"
);

impl Step {
    /// The step after this one.
    #[must_use]
    pub const fn next(self) -> Step {
        Step(self.0 + 1)
    }

    /// Whether this is step 0, in which rank 0's initial values go everywhere.
    #[must_use]
    pub const fn is_initial(self) -> bool {
        self.0 == 0
    }
}

/// Urgency of a tensor: larger goes first. Minus the forward position.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Priority(pub i32);

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "priority {}", self.0)
    }
}
