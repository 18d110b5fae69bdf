//! The op on an NVIDIA GPU. Where there is none every test is skipped, and says so.
#![cfg(feature = "cuda")]

mod append;
mod cache;
mod cases;
mod contracts;
mod cuts;
mod graphs;
mod large;
mod refusals;
mod specs;
mod support;
mod variants;
