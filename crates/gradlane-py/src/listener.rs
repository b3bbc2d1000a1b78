//! `Listener` for Python.

use crate::errors::translate;
use gradlane_net::{ChannelError, Listener as CoreListener};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// A bound, listening socket, made before its address is published.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Listener {
    listener: Mutex<Option<CoreListener>>,
    port: u16,
}

impl Listener {
    /// Takes the socket out, for a channel or to close it.
    pub(crate) fn take(&self) -> Option<CoreListener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Listener {
    /// Listen on an IPv4 or IPv6 address and the first free port of the range (0, 0: any port).
    #[new]
    fn new(host: &str, port_low: u16, port_high: u16) -> PyResult<Listener> {
        let listener = CoreListener::bind(host, port_low..=port_high).map_err(translate)?;
        let port = listener.address().port();
        Ok(Listener { listener: Mutex::new(Some(listener)), port })
    }

    /// The port that it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Stop listening. A listener that a channel has taken stops with the channel.
    fn close(&self) {
        drop(self.take());
    }
}

/// The error for a listener that is used up.
pub(crate) fn spent() -> PyErr {
    translate(ChannelError::Argument(
        "the listener is closed or belongs to another channel: make one for each channel"
            .to_owned(),
    ))
}
