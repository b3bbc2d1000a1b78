//! A processor that does not halt.

use pyo3::{pyfunction, Python};

/// Turns without a look at who the parent is: some milliseconds.
const TURNS: u32 = 1 << 17;

/// Spins, without the GIL, until the parent process is another than `parent`: until that has ended.
#[pyfunction]
pub fn keep_awake(py: Python<'_>, parent: u32) {
    py.detach(|| {
        while std::os::unix::process::parent_id() == parent {
            for _ in 0..TURNS {
                std::hint::spin_loop();
            }
        }
    });
}
