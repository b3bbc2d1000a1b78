//! `SquareSum` for Python: the norm of gradients, without rounding in between.

use crate::codec::bytes;
use gradlane_codec::{square_sum, FloatDtype};
use gradlane_units::SquareSum as CoreSquareSum;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// An exact sum of squares.
#[pyclass(module = "gradlane._core")]
pub(crate) struct SquareSum {
    sum: CoreSquareSum,
}

#[pymethods]
impl SquareSum {
    /// Nothing is added up yet.
    #[new]
    fn new() -> SquareSum {
        SquareSum { sum: CoreSquareSum::default() }
    }

    /// Add the squares of contiguous elements at an address.
    fn add(&mut self, py: Python<'_>, dtype: &str, pointer: usize, nbytes: usize) -> PyResult<()> {
        let float = FloatDtype::ALL.into_iter().find(|it| it.name() == dtype);
        let float =
            float.ok_or_else(|| PyValueError::new_err(format!("{dtype:?} is no float dtype")))?;
        let values = &*bytes(pointer, nbytes)?;
        let sum = py.detach(|| square_sum(float, values));
        self.sum.merge(&sum);
        Ok(())
    }

    /// The square root of the sum: infinite or NaN where a summand is.
    fn root(&self) -> f64 {
        root(&self.sum)
    }
}

impl SquareSum {
    /// The sum so far.
    pub(crate) fn sum(&self) -> &CoreSquareSum {
        &self.sum
    }
}

/// The square root of a sum of squares: infinite or NaN where a summand is.
pub(crate) fn root(sum: &CoreSquareSum) -> f64 {
    if sum.is_nan() {
        return f64::NAN;
    }
    if sum.is_infinite() {
        return f64::INFINITY;
    }
    let (integer, exponent) = sum.rounded();
    // An even power of two is taken out of the root, in two parts: neither leaves the range of f64.
    let odd = exponent & 1;
    let root = (integer as f64 * f64::from(1 + odd)).sqrt();
    let half = (exponent - odd) / 2;
    let first = half / 2;
    root * 2_f64.powi(first) * 2_f64.powi(half - first)
}
