//! Kernel source and specialization to code object, with an on-disk cache: clang for AMD.
