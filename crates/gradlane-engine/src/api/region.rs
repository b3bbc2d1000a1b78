//! Memory that the driver owns and the engine names.

use gradlane_units::TensorId;

/// A scratch buffer. The driver allocates it when it first meets it and frees it on
/// [`Event::BufferFree`](crate::Event::BufferFree); numbers are reused after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferRef {
    /// Number, small and dense.
    pub id: u32,
    /// Size; of an encoded slice, the bytes used, once they are known.
    pub bytes: u64,
}

impl BufferRef {
    /// The same buffer, of which this many bytes are used.
    pub(crate) fn fitted(self, bytes: u64) -> BufferRef {
        assert!(bytes <= self.bytes, "{bytes} encoded bytes in {}", self.bytes);
        BufferRef { bytes, ..self }
    }

    /// All of its bytes.
    pub(crate) fn whole(self) -> Region {
        Region { memory: Memory::Buffer(self), offset: 0, length: self.bytes }
    }
}

/// Memory that the driver knows the address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// The memory that the application lent for the tensor in this step.
    Gradient(TensorId),
    /// The parameter itself (updates on the server only).
    Parameter(TensorId),
    /// Scratch.
    Buffer(BufferRef),
}

/// A range of bytes in some memory; for tensors, `offset` counts from the tensor's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    /// The memory.
    pub memory: Memory,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

impl Region {
    /// The bytes of a frame within it.
    pub(crate) fn part(self, offset: u64, length: u32) -> Region {
        Region { offset: self.offset + offset, length: u64::from(length), ..self }
    }
}
