//! Where steps end in a recording: by annotations where the program was annotated, else by the optimizer's
//! frames, else by the period of the allocations themselves.
//!
//! Must not know: leaks, allocators.
//! Invariant: which way was taken is part of the answer; step ends are in the order of the events.

use super::period;
use super::recording::{Action, Annotation, Device, Recording, Stacks};
use hashbrown::HashMap;
use serde::Serialize;

/// torch's name for one call of an optimizer's step: this and the optimizer's own name.
const OPTIMIZER: &str = "Optimizer.step#";
/// A step's end as strandline's own traces mark it.
pub const STEP: &str = "strandline.step";
/// An epoch's beginning as strandline's own traces mark it.
pub const EPOCH: &str = "strandline.epoch";
const LOADER: &str = "enumerate(DataLoader)#";
/// Fewer steps than this are no rhythm.
const LEAST: usize = 3;

/// How the steps were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "by")]
pub enum Source {
    /// The ends of this annotation.
    Annotations { name: String },
    /// Allocations by a function `step` of `torch/optim`.
    OptimizerFrames,
    /// The allocations repeat after so many.
    Period { allocations: usize },
    /// There are none.
    Nothing,
}

/// The steps of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps {
    pub source: Source,
    /// Per device (in the recording's order): how many events lie before each step's end.
    pub ends: Vec<Vec<usize>>,
    /// When each step ended, in microseconds.
    pub times_us: Vec<u64>,
    /// How many steps had ended when each epoch began.
    pub epochs: Vec<usize>,
}

impl Steps {
    pub fn count(&self) -> usize {
        self.times_us.len()
    }

    /// How the steps were found, in words.
    pub fn said(&self) -> String {
        match &self.source {
            Source::Annotations { name } => format!("by the annotations {name}"),
            Source::OptimizerFrames => "by the optimizer's frames (there are no annotations)".to_owned(),
            Source::Period { allocations } => format!(
                "by the period of the history, {allocations} allocations (there are no annotations, and the \
                 optimizer does not allocate in each step)"
            ),
            Source::Nothing => {
                "no steps were found: there are no annotations, no frames of an optimizer, and \
                                the allocations do not repeat"
                    .to_owned()
            }
        }
    }
}

/// Finds the steps of a run.
pub fn steps(recording: &Recording) -> Steps {
    by_annotations(recording)
        .or_else(|| by_frames(recording))
        .or_else(|| by_period(recording))
        .unwrap_or_else(|| Steps {
            source: Source::Nothing,
            ends: vec![Vec::new(); recording.devices.len()],
            times_us: Vec::new(),
            epochs: Vec::new(),
        })
}

/// Steps by annotations: of several optimizers the one that is called most often counts, of equals the one
/// that begins first.
pub fn by_annotations(recording: &Recording) -> Option<Steps> {
    if recording.devices.iter().flat_map(|device| &device.events).all(|event| event.time_us == 0) {
        return None;
    }
    let name_of = |annotation: &Annotation| recording.stacks.name(annotation.name);
    let mut calls: HashMap<u32, (usize, usize)> = HashMap::new();
    for (order, annotation) in recording.annotations.iter().enumerate() {
        let name = name_of(annotation);
        if !annotation.begins && (name == STEP || name.starts_with(OPTIMIZER)) {
            calls.entry(annotation.name).or_insert((0, order)).0 += 1;
        }
    }
    let own = calls.keys().copied().find(|name| recording.stacks.name(*name) == STEP);
    let best = own.or_else(|| {
        let order = |entry: &(&u32, &(usize, usize))| (entry.1.0, std::cmp::Reverse(entry.1.1));
        calls.iter().max_by_key(order).map(|(name, _)| *name)
    })?;
    let ends = recording.annotations.iter().filter(|a| a.name == best && !a.begins);
    let mut times_us: Vec<u64> = ends.map(|annotation| annotation.time_us).collect();
    // Annotations may reach further than the history: of steps beyond nothing is known.
    let events = || recording.devices.iter().flat_map(|device| &device.events).map(|event| event.time_us);
    let (first, last) = (events().min()?, events().max()?);
    times_us.drain(..times_us.partition_point(|time| *time < first));
    times_us.truncate(times_us.partition_point(|time| *time <= last) + 1);
    let name = recording.stacks.name(best).to_owned();
    let epochs = epochs(recording, &times_us);
    Some(Steps { ends: places(recording, &times_us), times_us, epochs, source: Source::Annotations { name } })
}

/// How many events of each device lie at or before each time.
fn places(recording: &Recording, times_us: &[u64]) -> Vec<Vec<usize>> {
    let place = |device: &Device| {
        let mut before = 0;
        let ends = times_us.iter().map(|time| {
            // Never backwards, even where the events' times are out of order.
            before = before.max(device.events.partition_point(|event| event.time_us <= *time));
            before
        });
        ends.collect()
    };
    recording.devices.iter().map(place).collect()
}

/// Epochs begin where a loader is asked more often between two steps than it usually is: it was exhausted
/// and begun again.
fn epochs(recording: &Recording, step_ends: &[u64]) -> Vec<usize> {
    let begins = recording.annotations.iter().filter(|annotation| annotation.begins);
    let (mut own, mut asked) = (Vec::new(), vec![0usize; step_ends.len() + 1]);
    for annotation in begins {
        let name = recording.stacks.name(annotation.name);
        let done = step_ends.partition_point(|end| *end <= annotation.time_us);
        if name == EPOCH {
            own.push(done);
        } else if name.starts_with(LOADER) {
            asked[done] += 1;
        }
    }
    if !own.is_empty() {
        return own;
    }
    // What comes before the first step and after the last is not between steps.
    let Some(between) = asked.get(1..step_ends.len()).filter(|between| !between.is_empty()) else {
        return Vec::new();
    };
    let mut sorted = between.to_vec();
    sorted.sort_unstable();
    let usual = sorted[sorted.len() / 2];
    if usual == 0 {
        return Vec::new();
    }
    let again = between.iter().enumerate().filter(|(_, asked)| **asked > usual).map(|(at, _)| at + 1);
    let epochs: Vec<usize> = std::iter::once(0).chain(again).collect();
    if epochs.len() > 1 { epochs } else { Vec::new() }
}

/// Whether a stack lies in an optimizer's step.
pub fn in_optimizer(stacks: &Stacks, stack: u32) -> bool {
    stacks.frames(stack).any(|frame| {
        frame.function == "step"
            && frame.file.contains("torch/optim/")
            && !frame.file.ends_with("lr_scheduler.py")
    })
}

/// Per stack: whether it lies in an optimizer's step.
fn optimizer_stacks(recording: &Recording) -> Vec<bool> {
    let (_, _, stacks) = recording.stacks.counts();
    (0..stacks).map(|stack| in_optimizer(&recording.stacks, stack)).collect()
}

/// The device with the most events, by its place.
fn busiest(recording: &Recording) -> Option<usize> {
    (0..recording.devices.len()).max_by_key(|at| recording.devices[*at].events.len())
}

/// Steps by frames: a run of allocations in `torch/optim` ends a step. Not where the optimizer allocates only
/// now and then (SGD without foreach allocates its momentum once).
pub fn by_frames(recording: &Recording) -> Option<Steps> {
    let at = busiest(recording)?;
    let of_optimizer = optimizer_stacks(recording);
    let events = &recording.devices[at].events;
    let (mut ends, mut within) = (Vec::new(), false);
    let (mut allocations, mut places) = (0usize, Vec::new());
    for (index, event) in events.iter().enumerate().filter(|(_, event)| event.action == Action::Alloc) {
        let optimizer = of_optimizer[event.stack as usize];
        if within && !optimizer {
            ends.push(index);
            places.push(allocations);
        }
        within = optimizer;
        allocations += 1;
    }
    if within {
        ends.push(events.len());
        places.push(allocations);
    }
    let mut gaps: Vec<usize> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
    gaps.push(allocations - places.last().copied().unwrap_or(0));
    gaps.sort_unstable();
    let (usual, widest) = (gaps[gaps.len() / 2], gaps.last().copied().unwrap_or(0));
    let regular = ends.len() >= LEAST && widest <= usual.max(8) * 8;
    regular.then(|| from_ends(recording, at, ends, Source::OptimizerFrames))
}

/// Steps by the period of the allocations.
pub fn by_period(recording: &Recording) -> Option<Steps> {
    let at = busiest(recording)?;
    let events = &recording.devices[at].events;
    let allocations = || events.iter().enumerate().filter(|(_, event)| event.action == Action::Alloc);
    let with_stacks = allocations().any(|(_, event)| event.stack != 0);
    let signs: Vec<u64> = allocations()
        .map(|(_, event)| if with_stacks { u64::from(event.stack) } else { event.size })
        .collect();
    let found = period::find(&signs)?;
    let indices: Vec<usize> = allocations().map(|(index, _)| index).collect();
    let ends: Vec<usize> =
        found.ends.iter().map(|end| indices.get(*end).copied().unwrap_or(events.len())).collect();
    if ends.len() < LEAST {
        return None;
    }
    Some(from_ends(recording, at, ends, Source::Period { allocations: found.period }))
}

/// Steps whose ends are known on one device; on the others they fall at the same time.
fn from_ends(recording: &Recording, at: usize, ends: Vec<usize>, source: Source) -> Steps {
    let events = &recording.devices[at].events;
    let time =
        |end: &usize| end.checked_sub(1).and_then(|last| events.get(last)).map_or(0, |event| event.time_us);
    let times_us: Vec<u64> = ends.iter().map(time).collect();
    let mut all = places(recording, &times_us);
    all[at] = ends;
    let epochs = epochs(recording, &times_us);
    Steps { source, ends: all, times_us, epochs }
}
