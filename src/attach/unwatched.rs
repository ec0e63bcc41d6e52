//! The last line of a job that was started by `strandline run` and in which nothing was watched: whoever asked
//! for it shall not take silence for a clean run. Must not know heaps or ledgers.
//!
//! Not said when the process leaves by `_exit`: that may be in a signal handler, where nothing may be allocated.

use super::{options, outcome, process, python_boot, say, siblings};
use std::path::PathBuf;

/// Runs when the process exits, after everything else of it.
extern "C" fn at_exit() {
    let _ = std::panic::catch_unwind(leaving);
}

// SAFETY: the loader calls the functions of this section without arguments, once, while the library is mapped.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// The process leaves: says so if it was to be watched, and was not for a reason that nobody has said.
fn leaving() {
    if outcome::asked_to_run() != Some(true) || process::was_started() || python_boot::torch_was_seen() {
        return;
    }
    // A command within the job watches a job of its own, which says so itself.
    if std::env::current_exe().is_ok_and(|exe| exe.file_name().is_some_and(|name| name == "strandline")) {
        return;
    }
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let mode = variable("STRANDLINE_MODE").unwrap_or_default();
    let mode = options::mode_word(&mode.to_string_lossy()).unwrap_or("auto");
    if mode == "off" || variable("STRANDLINE_QUIET").is_some_and(|quiet| quiet != "0") {
        return;
    }
    let out = variable("STRANDLINE_OUT").map_or_else(|| PathBuf::from("strandline-out"), PathBuf::from);
    // Children that were watched have said so themselves.
    if siblings::have_reported(&out, None).unwrap_or(true) || !python_boot::first_copy() {
        return;
    }
    let cuda = if mode == "host" { "" } else { ", and no CUDA memory was asked for" };
    say(format_args!("nothing was watched: torch was never imported{cuda}"));
}
