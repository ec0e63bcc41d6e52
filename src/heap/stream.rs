//! Streams: which other streams use a block, frees that wait for them, and when a range is quiet.
//!
//! A block freed on its own stream is free at once, because later work of that stream comes later. A block
//! that other streams use (`record_stream`, or a block lent to another stream) is *pending* until their
//! events are done. Moving a page is no work of any stream, so a page may be moved only when all of the
//! device's work before the last free in it is done: it is *quiet*. The block's own stream is not enough:
//! programs use blocks on other streams without saying so, and get away with it as long as a block's memory
//! stays where it is. Quiet is known from *marks*: events of the whole device, recorded now and then, each
//! with the heap's clock at that moment; a free with an older clock is covered.
//!
//! It knows no pages. Invariant: an event is released exactly once, after it was seen done or waited for.

use std::collections::VecDeque;

use super::arena::part_of;
use super::block::{Id, NONE, State};
use super::slab::SlotState;
use super::stats::SMALL;
use super::{Driver, DriverError, Event, Heap, SLAB_MAX, Stream};

/// What is handed out: a fitted block, or a slot of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handed {
    Block(Id),
    Slot(u32, u16),
}

/// The streams that use one block besides its arena's.
#[derive(Default)]
pub(super) struct Uses {
    pub streams: Vec<Stream>,
    /// The stream that the block was handed to, if it is not its arena's.
    pub lent_to: Option<Stream>,
    /// Events that are not yet done.
    waiting: u32,
}

#[derive(Default)]
pub(super) struct Pending {
    /// The record with the ID 1 is the first.
    records: Vec<Uses>,
    vacant: Vec<Id>,
    /// Per stream, in the order of recording: a stream's events are done in order.
    queues: Vec<(Stream, VecDeque<(Event, Handed)>)>,
    /// Freed while no event could be recorded (a capture, or a driver that failed).
    pub deferred: Vec<Handed>,
    /// Blocks that are pending, deferred ones included.
    pub blocks: usize,
}

impl Pending {
    pub(super) fn new_uses(&mut self) -> Id {
        if let Some(id) = self.vacant.pop() {
            return id;
        }
        self.records.push(Uses::default());
        self.records.len() as Id
    }

    pub(super) fn uses(&self, id: Id) -> Option<&Uses> {
        self.records.get(id.checked_sub(1)? as usize)
    }

    pub(super) fn uses_mut(&mut self, id: Id) -> &mut Uses {
        &mut self.records[id as usize - 1]
    }

    pub(super) fn drop_uses(&mut self, id: Id) {
        if id != NONE {
            let uses = self.uses_mut(id);
            uses.streams.clear();
            (uses.lent_to, uses.waiting) = (None, 0);
            self.vacant.push(id);
        }
    }

    fn queue(&mut self, stream: Stream) -> &mut VecDeque<(Event, Handed)> {
        let index = match self.queues.iter().position(|(other, _)| *other == stream) {
            Some(index) => index,
            None => {
                self.queues.push((stream, VecDeque::new()));
                self.queues.len() - 1
            }
        };
        &mut self.queues[index].1
    }
}

/// Events of the device with the heap's clock at their recording.
#[derive(Default)]
pub(super) struct Marks {
    recorded: VecDeque<(u64, Event)>,
    /// Frees up to this clock are covered by work that is done.
    pub quiet: u64,
}

impl<D: Driver> Heap<D> {
    /// Whether a capture is, or may be, under way: then no event may be recorded or queried.
    pub(super) fn capturing(&self) -> bool {
        self.pools.capturing()
    }

    pub(super) fn uses_of(&self, handed: Handed) -> Id {
        match handed {
            Handed::Block(id) => self.blocks[id].b,
            Handed::Slot(slab, slot) => self.slabs[slab].meta[slot as usize].uses,
        }
    }

    /// A block is freed that other streams use: it waits for them. Returns the stream that it was handed to.
    #[cold]
    pub(super) fn wait_for(&mut self, handed: Handed, part: usize, size: u64) -> Stream {
        self.clock += 1;
        self.stats.began_to_wait(part, size);
        match handed {
            Handed::Block(id) => self.blocks[id].state = State::Pending,
            Handed::Slot(slab, slot) => {
                self.slabs[slab].meta[slot as usize].set_state(SlotState::Pending);
            }
        }
        let stream = self.stream_of(handed);
        self.begin_wait(handed);
        stream
    }

    /// Nobody uses a block any more that waited.
    fn settle(&mut self, handed: Handed) {
        match handed {
            Handed::Block(id) => {
                let block = self.blocks[id];
                self.stats.waited(part_of(block.arena), block.size, block.word);
                self.space.clear(block.region, block.addr);
                if block.size <= SLAB_MAX {
                    self.free_loose(block.arena, block.size);
                }
                self.give_block(id, block.arena, block.a);
            }
            Handed::Slot(id, slot) => {
                let slab = &self.slabs[id];
                let requested = slab.meta[slot as usize].requested();
                self.stats.waited(SMALL, u64::from(slab.size), requested);
                self.give_slot(id, slot as usize);
            }
        }
    }

    /// Starts the wait of a freed block for the streams that use it.
    fn begin_wait(&mut self, handed: Handed) {
        self.pending.blocks += 1;
        (self.until_poll, self.poll_gap) = (1, 1);
        if self.capturing() || self.record_uses(handed).is_err() {
            self.pending.deferred.push(handed);
        }
    }

    /// Records one event per stream that uses the block. On failure none is left behind.
    fn record_uses(&mut self, handed: Handed) -> Result<(), DriverError> {
        let id = self.uses_of(handed);
        let uses = self.pending.uses_mut(id);
        let streams = std::mem::take(&mut uses.streams);
        let lent_to = uses.lent_to;
        let mut events: Vec<(Stream, Event)> = Vec::with_capacity(streams.len() + 1);
        let mut failure = None;
        for stream in streams.iter().copied().chain(lent_to) {
            self.stats.work.events_recorded += 1;
            match self.driver.record_event(stream) {
                Ok(event) => events.push((stream, event)),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let uses = self.pending.uses_mut(id);
        uses.streams = streams;
        if let Some(error) = failure {
            for (_, event) in events {
                self.release_event(event);
            }
            return Err(error);
        }
        uses.waiting = events.len() as u32;
        for (stream, event) in events {
            self.pending.queue(stream).push_back((event, handed));
        }
        Ok(())
    }

    /// Gives back an event; a driver that cannot take it back leaves us nothing to do.
    fn release_event(&self, event: Event) {
        let _leaked_on_error = self.driver.release_event(event);
    }

    /// Lets every pending block go whose streams are done. Queries nothing during a capture.
    pub(super) fn process_events(&mut self) {
        if self.pending.blocks == 0 || self.capturing() {
            return;
        }
        self.retry_deferred();
        for index in 0..self.pending.queues.len() {
            while let Some(&(event, handed)) = self.pending.queues[index].1.front() {
                self.stats.work.events_queried += 1;
                if !matches!(self.driver.query_event(event), Ok(true)) {
                    break;
                }
                self.pending.queues[index].1.pop_front();
                self.event_done(event, handed);
            }
        }
    }

    fn retry_deferred(&mut self) {
        if !self.pending.deferred.is_empty() {
            for handed in std::mem::take(&mut self.pending.deferred) {
                if self.record_uses(handed).is_err() {
                    self.pending.deferred.push(handed);
                }
            }
        }
    }

    fn event_done(&mut self, event: Event, handed: Handed) {
        self.release_event(event);
        let id = self.uses_of(handed);
        let uses = self.pending.uses_mut(id);
        uses.waiting -= 1;
        if uses.waiting == 0 {
            self.pending.drop_uses(id);
            self.pending.blocks -= 1;
            self.settle(handed);
        }
    }

    /// Waits on the host for every pending block. During a capture nothing happens.
    pub(super) fn wait_events(&mut self) {
        if self.pending.blocks == 0 || self.capturing() {
            return;
        }
        self.stats.num_sync_all_streams += 1;
        self.retry_deferred();
        for index in 0..self.pending.queues.len() {
            while let Some(&(event, handed)) = self.pending.queues[index].1.front() {
                self.stats.work.host_waits += 1;
                if self.driver.wait_event(event).is_err() {
                    break;
                }
                self.pending.queues[index].1.pop_front();
                self.event_done(event, handed);
            }
        }
    }

    /// The clock of the newest free.
    fn last_free(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.last_free).max().unwrap_or(0)
    }

    /// Records a mark if something was freed since the last one. During a capture, or where the driver
    /// fails, nothing happens; what was freed then just stays unquiet.
    pub(super) fn mark(&mut self) {
        let newest = self.marks.recorded.back().map_or(self.marks.quiet, |mark| mark.0);
        if self.capturing() || newest >= self.last_free() || self.marks.recorded.len() >= 8 {
            return;
        }
        if let Ok(event) = self.device_event() {
            self.marks.recorded.push_back((self.clock, event));
        }
    }

    /// An event behind all work of the device up to now.
    pub(super) fn device_event(&mut self) -> Result<Event, DriverError> {
        self.stats.work.events_recorded += 1;
        let lanes = self.lanes.iter().filter(|lane| lane.in_use);
        let streams: Vec<Stream> = lanes.map(|lane| lane.stream).collect();
        self.driver.record_device_event(&streams)
    }

    /// Finds out how far the device is quiet.
    pub(super) fn look(&mut self) {
        if self.capturing() {
            return;
        }
        while let Some(&(clock, event)) = self.marks.recorded.front() {
            self.stats.work.events_queried += 1;
            if !matches!(self.driver.query_event(event), Ok(true)) {
                break;
            }
            self.passed(clock, event);
        }
    }

    /// Waits on the host until all free memory is quiet; false if it could not be.
    pub(super) fn hush(&mut self) -> bool {
        self.look();
        if self.capturing() {
            return false;
        }
        let last = self.last_free();
        while self.marks.quiet < last {
            self.mark();
            let Some(&(clock, event)) = self.marks.recorded.front() else { return false };
            self.stats.work.host_waits += 1;
            if self.driver.wait_event(event).is_err() {
                return false;
            }
            self.passed(clock, event);
        }
        true
    }

    fn passed(&mut self, clock: u64, event: Event) {
        self.marks.recorded.pop_front();
        self.marks.quiet = self.marks.quiet.max(clock);
        self.release_event(event);
    }

    /// Waits on the host for the whole device; false if that is impossible now.
    pub(super) fn wait_device(&mut self) -> bool {
        if self.capturing() {
            return false;
        }
        self.stats.work.host_waits += 1;
        if self.driver.synchronize_device().is_err() {
            return false;
        }
        let clock = self.clock;
        while let Some(&(_, event)) = self.marks.recorded.front() {
            self.passed(clock, event);
        }
        self.marks.quiet = clock;
        for lane in &mut self.lanes {
            lane.loud = false;
        }
        self.process_events();
        true
    }

    /// Gives all events back without waiting; for the heap's end, after the device was waited for.
    pub(super) fn drop_events(&mut self) {
        for (_, event) in self.marks.recorded.drain(..) {
            let _leaked_on_error = self.driver.release_event(event);
        }
        for (_, queue) in &mut self.pending.queues {
            for (event, _) in queue.drain(..) {
                let _leaked_on_error = self.driver.release_event(event);
            }
        }
    }
}
