//! A recording's stacks as the ledger and the report ask for them.
//!
//! Must not know: reports.
//! Invariant: a frame is the user's own unless its file says otherwise.

use super::clock;
use super::recording::{FrameRef, Recording, Stacks};
use crate::ledger::{Frame, Phase, Symbols};

/// What marks the file of a library: installed packages, the standard library, torch built in place.
const LIBRARIES: &[&str] = &[
    "/site-packages/",
    "/dist-packages/",
    "/torch/nn/",
    "/torch/optim/",
    "/torch/autograd/",
    "/torch/utils/",
    "/torch/_",
    "/torch/cuda/",
    "/torch/distributed/",
    "/runpy.py",
];

/// Resolves the stacks of a recording.
pub struct RecordedSymbols<'r>(pub &'r Recording);

impl Symbols for RecordedSymbols<'_> {
    fn frames(&self, stack: u32) -> Vec<Frame> {
        let frames = self.0.stacks.frames(stack).map(|frame| {
            let native = is_native(frame);
            Frame {
                file: frame.file.to_owned(),
                line: frame.line,
                function: frame.function.to_owned(),
                kind: if native { "native" } else { "python" }.to_owned(),
                user: !native && is_user(frame.file),
            }
        });
        frames.collect()
    }
}

/// Frames of C++ (recorded with `stacks="all"`) come from an object file or a source of its own.
fn is_native(frame: FrameRef<'_>) -> bool {
    let file = frame.file;
    !file.ends_with(".py")
        && !file.starts_with('<')
        && !file.contains(".ipynb")
        && !file.contains("ipykernel")
        || file == "<unknown>"
}

/// Whether a Python file is the user's own.
fn is_user(file: &str) -> bool {
    let generated = file.starts_with('<') && !file.starts_with("<ipython") && !file.starts_with("<stdin");
    !generated && !LIBRARIES.iter().any(|part| file.contains(part)) && !is_standard_library(file)
}

/// `…/lib/python3.12/…`
fn is_standard_library(file: &str) -> bool {
    file.split_once("/lib/python3").is_some_and(|(_, rest)| {
        let minor = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit() || c == 't');
        minor.starts_with('/')
    })
}

/// The phase in which each stack allocates, as far as its frames tell.
pub fn phases(stacks: &Stacks) -> Vec<Phase> {
    let (_, _, count) = stacks.counts();
    (0..count).map(|stack| phase(stacks, stack)).collect()
}

fn phase(stacks: &Stacks, stack: u32) -> Phase {
    if clock::in_optimizer(stacks, stack) {
        return Phase::Optimizer;
    }
    let mut forward = false;
    for frame in stacks.frames(stack) {
        if frame.file.contains("torch/autograd/") && frame.function.contains("backward") {
            return Phase::Backward;
        }
        forward |= frame.file.ends_with("torch/nn/modules/module.py") && frame.function == "_call_impl";
    }
    if forward { Phase::Forward } else { Phase::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_files_are_told_from_libraries() {
        for file in
            ["train.py", "/home/me/proj/model.py", "workloads/a.py", "<ipython-input-3>", "/lib/python/x.py"]
        {
            assert!(is_user(file), "{file}");
        }
        for file in [
            "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py",
            "/usr/lib/python3.12/threading.py",
            "/usr/lib/python3.13t/threading.py",
            "<frozen runpy>",
            "<string>",
            "/src/pytorch/torch/nn/functional.py",
        ] {
            assert!(!is_user(file), "{file}");
        }
    }
}
