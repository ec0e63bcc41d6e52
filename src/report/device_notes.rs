//! What a device's own numbers say is no leak: peaks, the allocator's cache, memory outside torch.
//!
//! Must not know: sites, findings.
//! Invariant: a note never accuses.

use super::units;
use crate::ledger::device::{DeviceBooks, DevicePoint};
use crate::ledger::notes::Note;
use crate::ledger::{Accounts, Phase, pattern, trend};

/// Reserved memory beyond what steps need is worth a word from here on.
const CACHE: u64 = 8 << 20;
/// Growth outside torch that is worth a word.
const OUTSIDE: u64 = 64 << 20;

/// The notes of one device.
pub fn notes(accounts: &Accounts) -> Vec<Note> {
    let books = accounts.books();
    let found = [peak(books), cache(books), outside(books)];
    found.into_iter().flatten().map(|note| Note { device: accounts.device(), ..note }).collect()
}

/// What a step usually needs for itself, lately.
fn usual_need(books: &DeviceBooks) -> u64 {
    let series = books.series();
    let recent = &series[series.len() / 2..];
    let need = |point: &DevicePoint| point.peak.saturating_sub(point.allocated) as f64;
    let mut needs: Vec<f64> = recent.iter().map(|(_, point)| need(point)).collect();
    trend::median(&mut needs).unwrap_or(0.0) as u64
}

/// One step, or ever rarer ones, needed more than all others.
fn peak(books: &DeviceBooks) -> Option<Note> {
    let (newest, count) = books.record()?;
    let (ended, _) = *books.last_point()?;
    let usual = usual_need(books);
    if pattern::grows_with_input(books) || ended < pattern::WARM_UP || newest.need <= usual + usual / 4 {
        return None;
    }
    let (kind, because) = if newest.step < 3 {
        (
            "warm-up-peak",
            "it is the warm-up: workspaces, autotuning (cudnn.benchmark tries every algorithm) or first-time state; it \
             comes again only for a new shape"
                .to_owned(),
        )
    } else if newest.phase == Phase::Validation {
        (
            "validation-peak",
            "validation needs more at once than a training step, and all of it is freed again".to_owned(),
        )
    } else if newest.by_input {
        ("largest-input", "it is the largest input so far, and all of it is freed again".to_owned())
    } else {
        (
            "other-work",
            "that step did something that the usual ones do not (this line allocated most of it), and all of it is freed \
             again"
                .to_owned(),
        )
    };
    let (high, low) = (units::bytes(newest.need as f64), units::bytes(usual as f64));
    // Among inputs in random order, the n-th is the largest so far with probability 1/n.
    let rare = f64::from(count) <= 2.0 + 3.0 * f64::from(ended.max(1)).ln();
    let what = if count > 2 && newest.step >= 3 && rare {
        let thins = if books.records_thin_out() { ", ever more rarely" } else { "" };
        format!(
            "a step's need rose {} times{thins}, to {high} in step {}; usual is {low}",
            count - 1,
            newest.step
        )
    } else {
        format!("step {} needed {high} at once; usual is {low}", newest.step)
    };
    let stack = newest.stack.filter(|_| kind == "other-work");
    Some(Note { kind, stack, what, because, bytes: newest.need, ..Note::default() })
}

/// Much more is reserved than any recent step needed, and it no longer grows.
fn cache(books: &DeviceBooks) -> Option<Note> {
    let series = books.series();
    let (ended, last) = *books.last_point()?;
    let recent = &series[series.len() * 2 / 3..];
    let (from, first) = *recent.first()?;
    let needed = recent.iter().map(|(_, point)| point.peak).max()?.max(last.peak);
    let idle = last.reserved.saturating_sub(needed);
    if ended < pattern::WARM_UP
        || idle < CACHE
        || last.reserved < needed * 3 / 2
        || last.reserved > first.reserved
    {
        return None;
    }
    Some(Note {
        kind: "cache",
        what: format!(
            "reserved stays at {} since step {from}, while no step since needed more than {}",
            units::bytes(last.reserved as f64),
            units::bytes(needed as f64)
        ),
        because: "the allocator keeps what an earlier step needed, for reuse; torch.cuda.empty_cache() gives it back"
            .to_owned(),
        bytes: idle,
        ..Note::default()
    })
}

/// Memory of the device that torch's allocator did not hand out has grown.
fn outside(books: &DeviceBooks) -> Option<Note> {
    let (first, now) = (books.outside_at_first()?, books.last_sample().outside);
    if now < first + OUTSIDE {
        return None;
    }
    Some(Note {
        kind: "outside-torch",
        what: format!("memory outside torch's allocator grew from {} to {}", units::bytes(first as f64), units::bytes(now as f64)),
        because: "no tensor has it: the CUDA context, NCCL communicators, CUDA graphs, libraries, or another process \
                  (nvidia-smi lists them)"
            .to_owned(),
        bytes: now - first,
        ..Note::default()
    })
}
