//! `Codec` for Python: encodings of values in memory that Python vouches for.

use gradlane_codec::{build, Codec as CoreCodec, CodecSpec, DrawKey, TensorShape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// An encoding of f32 values of one tensor.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Codec {
    codec: Arc<dyn CoreCodec>,
}

#[allow(clippy::needless_pass_by_value)]
fn refuse(text: impl ToString) -> PyErr {
    PyValueError::new_err(text.to_string())
}

/// Values at an address that Python vouches for; none need no address.
fn values<'a>(pointer: usize, count: usize) -> PyResult<&'a mut [f32]> {
    if count == 0 {
        return Ok(&mut []);
    }
    if pointer == 0 || !pointer.is_multiple_of(align_of::<f32>()) {
        return Err(refuse(format!("{pointer:#x} is no address of f32 values")));
    }
    let values = std::ptr::with_exposed_provenance_mut::<f32>(pointer);
    // SAFETY: the caller holds a contiguous f32 tensor of that many elements during the call, which
    // nobody else uses; this is what the stub file asks of callers. The address is aligned and not
    // null.
    Ok(unsafe { std::slice::from_raw_parts_mut(values, count) })
}

/// Bytes at an address that Python vouches for.
pub(crate) fn bytes<'a>(pointer: usize, count: usize) -> PyResult<&'a mut [u8]> {
    if count == 0 {
        return Ok(&mut []);
    }
    if pointer == 0 {
        return Err(refuse("0 is no address of bytes"));
    }
    let bytes = std::ptr::with_exposed_provenance_mut::<u8>(pointer);
    // SAFETY: as for `values`; bytes have no alignment.
    Ok(unsafe { std::slice::from_raw_parts_mut(bytes, count) })
}

/// (seed, step, tensor, leg, first element); a leg of -1 is the broadcast.
type DrawKeyNumbers = (u64, u64, u32, i64, u64);

fn draw_key((seed, step, tensor, leg, first_element): DrawKeyNumbers) -> PyResult<DrawKey> {
    let leg = match leg {
        -1 => DrawKey::BROADCAST,
        _ => u32::try_from(leg)
            .ok()
            .filter(|&leg| leg != DrawKey::BROADCAST)
            .ok_or_else(|| refuse(format!("leg {leg} is neither a rank nor -1, the broadcast")))?,
    };
    Ok(DrawKey { seed, step, tensor, leg, first_element })
}

#[pymethods]
impl Codec {
    /// Build the codec of a spec for a tensor of these sizes, in the order of its storage.
    #[new]
    #[allow(clippy::needless_pass_by_value)]
    fn new(spec: &str, sizes: Vec<u64>) -> PyResult<Codec> {
        let spec: CodecSpec = spec.parse().map_err(refuse)?;
        Ok(Codec { codec: build(&spec, &TensorShape::new(&sizes)) })
    }

    /// The canonical text.
    #[getter]
    fn spec(&self) -> String {
        self.codec.spec().to_string()
    }

    /// Parts of a tensor begin at multiples of so many elements.
    #[getter]
    fn granule(&self) -> u64 {
        self.codec.granule()
    }

    /// Whether the length of an encoding depends on the number of elements alone.
    #[getter]
    fn is_fixed_size(&self) -> bool {
        self.codec.is_fixed_size()
    }

    /// Whether the expectation of what is decoded is the value.
    #[getter]
    fn is_unbiased(&self) -> bool {
        self.codec.is_unbiased()
    }

    /// f32 numbers that a residual has for each value; 0 where none is kept.
    #[getter]
    fn residual_width(&self) -> usize {
        if self.codec.keeps_residual() {
            self.codec.residual_width()
        } else {
            0
        }
    }

    /// The most bytes that so many values take under a key.
    fn max_wire_bytes(&self, at: DrawKeyNumbers, elements: usize) -> PyResult<usize> {
        Ok(self.codec.max_wire_bytes_at(&draw_key(at)?, elements))
    }

    /// Encode values to the front of a buffer and return the number of bytes.
    ///
    /// `values`, `residual` and `wire` are addresses and numbers of elements; a residual of no
    /// elements is none.
    fn encode(
        &self,
        py: Python<'_>,
        at: DrawKeyNumbers,
        source: (usize, usize),
        residual: (usize, usize),
        wire: (usize, usize),
    ) -> PyResult<usize> {
        let at = draw_key(at)?;
        let granule = self.codec.granule();
        if !at.first_element.is_multiple_of(granule) {
            return Err(refuse(format!(
                "element {} is no multiple of the granule of {granule} elements",
                at.first_element
            )));
        }
        let needed = self.codec.max_wire_bytes_at(&at, source.1);
        if wire.1 < needed {
            return Err(refuse(format!("{needed} bytes are needed, the buffer has {}", wire.1)));
        }
        let wanted = source.1 * self.codec.residual_width();
        if residual.1 != 0 && residual.1 != wanted {
            return Err(refuse(format!(
                "a residual of {} numbers was given, {wanted} belong to {} values",
                residual.1, source.1
            )));
        }
        let source = &*values(source.0, source.1)?;
        let kept = if residual.1 == 0 { None } else { Some(values(residual.0, residual.1)?) };
        let wire = bytes(wire.0, wire.1)?;
        Ok(py.detach(|| self.codec.encode(&at, source, kept, wire)))
    }

    /// Decode bytes into values.
    fn decode(&self, py: Python<'_>, wire: (usize, usize), out: (usize, usize)) -> PyResult<()> {
        let (wire, out) = (&*bytes(wire.0, wire.1)?, values(out.0, out.1)?);
        py.detach(|| self.codec.decode(wire, out)).map_err(refuse)
    }

    /// Decode bytes and add them to values.
    fn decode_add(
        &self,
        py: Python<'_>,
        wire: (usize, usize),
        sum: (usize, usize),
    ) -> PyResult<()> {
        let (wire, sum) = (&*bytes(wire.0, wire.1)?, values(sum.0, sum.1)?);
        py.detach(|| self.codec.decode_add(wire, sum)).map_err(refuse)
    }
}
