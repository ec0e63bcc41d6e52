//! One device's events, driven through an allocator.
//!
//! Must not know: which allocator; leaks.
//! Invariant: blocks that are handed out at the same time never overlap, else the replay fails.

use super::price;
use super::recording::{Action, Device, Event, Recording};
use super::start::Start;
use super::subject::Subject;
use crate::driver::{Address, Stream};
use hashbrown::HashMap;
use serde::Serialize;
use std::collections::BTreeMap;

/// Is told of blocks as the recorded program saw them.
pub trait Watch {
    /// A block came; what is returned comes back when it goes.
    fn born(&mut self, stack: u32, requested: u64) -> (u64, u64);
    fn died(&mut self, tag: (u64, u64), requested: u64);
}

/// The recorded run out of memory, and what the replay held then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfMemory {
    pub device: i32,
    /// Bytes that could not be had.
    pub size: u64,
    /// Bytes free on the device.
    pub device_free: u64,
    pub recorded_reserved: u64,
    pub reserved: u64,
    /// Whether the request fits into what the replay's allocator leaves of the device.
    pub would_fit: bool,
}

/// A request that the replay's allocator could not serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    pub device: i32,
    pub size: u64,
    /// Steps that had ended.
    pub step: usize,
    pub why: String,
}

#[derive(Clone, Copy)]
struct Live {
    /// Where the replay's allocator put it; None if it could not.
    at: Option<Address>,
    requested: u64,
    tag: (u64, u64),
    /// Given back.
    pending: bool,
    /// The work of another stream that it was given back with.
    work: Option<u64>,
}

/// Where a block ends, and whether it was given back with work on it.
#[derive(Clone, Copy)]
struct Taken {
    end: u64,
    pending: bool,
}

/// The replay of one device.
pub struct Player<'r, S> {
    recording: &'r Recording,
    device: &'r Device,
    subject: S,
    next: usize,
    live: HashMap<u64, Live>,
    taken: BTreeMap<Address, Taken>,
    requested: u64,
    active: u64,
    recorded_reserved: u64,
    recorded_us: f64,
    pub out_of_memory: Vec<OutOfMemory>,
    /// The first request that was not served, and how many.
    pub refused: Option<Refused>,
    pub refusals: u64,
}

impl<'r, S: Subject> Player<'r, S> {
    /// Puts in place what was there before the first event.
    ///
    /// # Errors
    /// If the allocator errs.
    pub fn begin(
        recording: &'r Recording,
        device: &'r Device,
        start: &Start,
        subject: S,
        watch: &mut impl Watch,
    ) -> Result<Player<'r, S>, String> {
        let mut player = Player {
            recording,
            device,
            subject,
            next: 0,
            live: HashMap::new(),
            taken: BTreeMap::new(),
            requested: 0,
            active: 0,
            recorded_reserved: start.reserved,
            recorded_us: 0.0,
            out_of_memory: Vec::new(),
            refused: None,
            refusals: 0,
        };
        for block in &start.blocks {
            player.alloc(block.address, block.requested, block.stream, block.stack, 0, watch)?;
            if block.pending {
                player.free_requested(block.address, true, watch)?;
            }
        }
        Ok(player)
    }

    /// Replays the events before number `end`. `step` is how many steps have ended.
    ///
    /// # Errors
    /// If the allocator errs: overlapping blocks, or a block that it does not know again.
    pub fn until(&mut self, end: usize, step: usize, watch: &mut impl Watch) -> Result<(), String> {
        let events = &self.device.events;
        while let Some(event) = events.get(self.next).filter(|_| self.next < end) {
            self.next += 1;
            match event.action {
                Action::Alloc => {
                    let stream = self.recording.streams.get(event.stream as usize).copied().unwrap_or(0);
                    self.alloc(event.address, event.size, stream, event.stack, step, watch)?;
                }
                Action::FreeRequested => {
                    let completed = events.get(self.next).is_some_and(|next| {
                        next.action == Action::FreeCompleted && next.address == event.address
                    });
                    self.free_requested(event.address, !completed, watch)?;
                }
                Action::FreeCompleted => {
                    // Where the history lacks the request, this is it.
                    self.free_requested(event.address, false, watch)?;
                    self.free_completed(event.address);
                }
                Action::SegmentAlloc | Action::SegmentMap => self.recorded_segment(event, false),
                Action::SegmentFree | Action::SegmentUnmap => self.recorded_segment(event, true),
                Action::OutOfMemory => self.recorded_out_of_memory(event),
                Action::Snapshot => {}
            }
        }
        Ok(())
    }

    fn alloc(
        &mut self,
        address: u64,
        requested: u64,
        stream: u64,
        stack: u32,
        step: usize,
        watch: &mut impl Watch,
    ) -> Result<(), String> {
        if self.live.contains_key(&address) {
            // Its free is missing in the history.
            self.free_requested(address, false, watch)?;
            self.free_completed(address);
        }
        let at = match self.subject.malloc(stack, requested, Stream(stream)) {
            Ok(at) => {
                self.occupy(at, requested.max(1))?;
                Some(at)
            }
            Err(why) => {
                self.refusals += 1;
                let device = self.device.index;
                self.refused.get_or_insert(Refused { device, size: requested, step, why });
                None
            }
        };
        let tag = watch.born(stack, requested);
        self.live.insert(address, Live { at, requested, tag, pending: false, work: None });
        self.requested += requested;
        self.active += requested;
        Ok(())
    }

    fn occupy(&mut self, at: Address, size: u64) -> Result<(), String> {
        let end = at.checked_add(size).ok_or("the heap handed out an address that overflows")?;
        while let Some((other, taken)) =
            self.taken.range(..end).next_back().filter(|(_, taken)| taken.end > at)
        {
            let (other, until) = (*other, taken.end);
            if !taken.pending {
                return Err(format!(
                    "the heap handed out {at:#x}..{end:#x} over {other:#x}..{until:#x}: a bug"
                ));
            }
            // It waited for the stream, earlier than the recorded allocator did.
            self.taken.remove(&other);
        }
        self.taken.insert(at, Taken { end, pending: false });
        Ok(())
    }

    fn free_requested(&mut self, address: u64, in_use: bool, watch: &mut impl Watch) -> Result<(), String> {
        let Some(live) = self.live.get_mut(&address).filter(|live| !live.pending) else { return Ok(()) };
        watch.died(live.tag, live.requested);
        live.pending = true;
        self.requested -= live.requested;
        let Some(at) = live.at else { return Ok(()) };
        if in_use {
            live.work = Some(self.subject.free_in_use(at)?);
            if let Some(taken) = self.taken.get_mut(&at) {
                taken.pending = true;
            }
            return Ok(());
        }
        self.taken.remove(&at);
        self.subject.free(at)
    }

    fn free_completed(&mut self, address: u64) {
        let Some(live) = self.live.remove(&address) else { return };
        self.active -= live.requested;
        let (Some(at), Some(work)) = (live.at, live.work) else { return };
        // Something else may lie there by now.
        if self.taken.get(&at).is_some_and(|taken| taken.pending) {
            self.taken.remove(&at);
        }
        self.subject.completed(work);
    }

    fn recorded_segment(&mut self, event: &Event, gone: bool) {
        let own = matches!(event.action, Action::SegmentAlloc | Action::SegmentFree);
        self.recorded_us += match own {
            true => price::segment_us(event.size, gone),
            false => price::expandable_us(event.size, gone),
        };
        self.recorded_reserved = match gone {
            true => self.recorded_reserved.saturating_sub(event.size),
            false => self.recorded_reserved + event.size,
        };
    }

    fn recorded_out_of_memory(&mut self, event: &Event) {
        let reserved = self.subject.figures().reserved;
        let device_free = event.address;
        self.out_of_memory.push(OutOfMemory {
            device: self.device.index,
            size: event.size,
            device_free,
            recorded_reserved: self.recorded_reserved,
            reserved,
            would_fit: reserved.saturating_add(event.size)
                <= self.recorded_reserved.saturating_add(device_free),
        });
    }

    /// Requested bytes in use by the recorded program.
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// The same, with blocks that are given back but still in use by a stream.
    pub fn active(&self) -> u64 {
        self.active
    }

    /// What the recorded allocator holds.
    pub fn recorded_reserved(&self) -> u64 {
        self.recorded_reserved
    }

    /// What the recorded allocator's driver calls cost.
    pub fn recorded_us(&self) -> f64 {
        self.recorded_us
    }

    pub fn subject(&self) -> &S {
        &self.subject
    }
}
