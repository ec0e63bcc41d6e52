//! What the ledger asks of call stacks: a number becomes frames when a report is written.
//!
//! Must not know: how stacks are captured, interned or symbolized.
//! Invariant: frames are innermost first.

use serde::{Deserialize, Serialize};

/// One frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    pub file: String,
    pub line: u32,
    pub function: String,
    /// "python" or "native".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// The user's own code: not site-packages, not the standard library.
    #[serde(default)]
    pub user: bool,
}

/// Resolves stack IDs.
pub trait Symbols {
    /// The frames of a stack, innermost first; empty when the stack is unknown.
    fn frames(&self, stack: u32) -> Vec<Frame>;

    /// The innermost frame of the user's own code.
    fn allocated_at(&self, stack: u32) -> Option<Frame> {
        self.frames(stack).into_iter().find(|frame| frame.user)
    }
}

/// Knows nothing: for programs without stacks.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSymbols;

impl Symbols for NoSymbols {
    fn frames(&self, _stack: u32) -> Vec<Frame> {
        Vec::new()
    }
}
