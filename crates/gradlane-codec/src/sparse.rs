//! Sparse codecs: only the largest values of a slice travel, the others are kept for later.
#![allow(dead_code)]

pub(crate) mod selection;
pub(crate) mod wire;
