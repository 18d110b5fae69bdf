//! What is alive on a device and what it was asked to do, for tests.

use std::sync::atomic::{AtomicI64, Ordering};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of one device.
        #[derive(Default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: Count,)*
        }

        impl Counts {
            /// The count called `name`.
            pub fn named(&self, name: &str) -> Option<i64> {
                match name {
                    $(stringify!($name) => Some(self.$name.get()),)*
                    _ => None,
                }
            }

            /// Names and values of all.
            pub fn all(&self) -> Vec<(&'static str, i64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counts! {
    /// Live device allocations.
    allocations,
    /// Their bytes.
    bytes,
    /// Live pinned allocations.
    host_allocations,
    /// Their bytes.
    host_bytes,
    /// Live streams.
    streams,
    /// Live events.
    events,
    /// Loaded modules.
    modules,
    /// Live graphs.
    graphs,
    /// Live instantiated graphs.
    graph_execs,
    /// Device allocations ever made.
    mallocs,
    /// Pinned allocations ever made.
    host_mallocs,
    /// Modules ever loaded.
    module_loads,
    /// Kernel launches, captured ones left out.
    launches,
    /// Kernels executed, those of graphs included.
    kernels,
    /// Graph launches.
    graph_launches,
    /// Copies executed, those of graphs included.
    copies,
    /// Bytes that they copied.
    copied_bytes,
    /// Fills executed, those of graphs included.
    memsets,
    /// Waits that the caller asked for: stream, device and event synchronizations, blocking copies, asynchronous ones to pageable memory.
    synchronizations,
    /// Waits that freeing memory implies.
    implicit_synchronizations,
}

/// One count.
#[derive(Default)]
pub struct Count(AtomicI64);

impl Count {
    /// Adds.
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}
