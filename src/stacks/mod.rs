//! Call stacks.
