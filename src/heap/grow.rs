//! Growth: where an arena gets memory that it does not have.
//!
//! A request for which no free range is large enough gets a [`Window`] of addresses. Its pages are handles
//! that lie idle elsewhere, or are made anew. A handle that is needed elsewhere is mapped there too and
//! keeps its old mapping as a *shadow* (on a device without such aliases it is unmapped first: both are
//! called *stitching*). A window that lies in the shadows of idle handles costs no driver call: so a job
//! that repeats itself soon finds all the mappings that it needs.
//!
//! It knows how much memory may be made, not how a handle moves. Invariant: a driver call that fails leaves
//! the books as the driver has them.

use super::arena::{KEPT, RUNS, part_for};
use super::block::State;
use super::chain::Window;
use super::segment::{PAGE, Piece};
use super::stats::{LARGE, SMALL};
use super::stitch::Idle;
use super::window::{Own, Supply};
use super::{Address, AddressSpace, Driver, DriverError, Handle, Heap, kind_of, lane_of, part_of};

/// Why an arena could not grow.
#[derive(Debug)]
pub(super) enum Shortage {
    /// No physical memory; pressure may help.
    Memory,
    /// The driver failed otherwise.
    Driver(DriverError),
}

impl From<DriverError> for Shortage {
    fn from(error: DriverError) -> Self {
        match error {
            DriverError::OutOfMemory => Shortage::Memory,
            other => Shortage::Driver(other),
        }
    }
}

/// How much physical memory may be made before idle pages are moved instead; bytes.
#[derive(Clone, Copy)]
struct Allowance {
    /// Before quiet pages are moved.
    quiet: u64,
    /// Before the host waits for pages to become quiet.
    wait: u64,
    /// What a piece that is made may exceed the need by.
    ahead: u64,
}

/// Addresses of one segment for small requests; bytes.
const SMALL_SEGMENT: u64 = 1 << 30;
/// Reservations are made of this size at least, if the addresses are to be had; bytes.
const SMALL_REGION: u64 = 16 << 30;

/// Mappings of idle memory that are free, so that a job that only warms up is packed tightly.
const MOVES_IN_ADVANCE: u64 = 256;
/// Requests that pay for one more: about 40 µs on an H200, where a request of a training job comes every
/// 20 µs or so.
const REQUESTS_PER_MOVE: u64 = 64;
/// Unpaid ones after which physical memory may grow by another thousandth of the peak.
const MOVES_PER_THOUSANDTH: u64 = 16;
/// So many per piece it takes until requests that are given the places that they had before have settled there. A
/// job whose steps differ never settles, nor one whose places are still in use when they are wanted again,
/// because the host is far ahead of the device.
pub(super) const MOVES_TO_SETTLE: u64 = 2;

/// Bytes that are made ahead of need at most: as many as PyTorch makes at once.
const MOST_AHEAD: u64 = 20 << 20;
/// For small requests it is also at most this part of what they have: mostly that is little.
const SMALL_SHARE: u64 = 64;

/// Bytes of the device that are left to others at most, while idle memory is at hand.
const SPARED_MOST: u64 = 1 << 30;
/// The same when none is: a kernel that finds no room to be loaded in ends the job with an error that nobody
/// can catch and go on from.
const LEFT_MOST: u64 = 256 << 20;

impl<D: Driver> Heap<D> {
    /// Gives the arena a free range of at least `size` bytes.
    pub(super) fn grow(&mut self, arena: u16, size: u64) -> Result<(), Shortage> {
        if self.plain {
            return self.grow_plain(arena, size);
        }
        self.grow_somewhere(arena, size, Own::default()).map(drop)
    }

    /// The same; returns where the request is to lie. `own` tells where the same request lay before. Not for
    /// plain segments.
    pub(super) fn grow_somewhere(&mut self, arena: u16, size: u64, own: Own) -> Result<Window, Shortage> {
        self.retire_all_empty_slabs();
        self.look();
        self.mark();
        self.look();
        self.begin_survey();
        self.find_wanted(lane_of(arena));
        let mut idle = self.find_idle(Some(lane_of(arena)));
        let allowance = self.allowance(arena, size);
        let room = self.has_room(size.next_multiple_of(PAGE));
        let supply = Supply {
            fresh: if room { allowance.quiet.saturating_sub(self.space.physical) } else { 0 },
            unwanted: self.unwanted(&idle),
        };
        let window = match self.best_window(arena, size, own, supply) {
            Some(window) => window,
            None => self.new_segment(arena, size)?,
        };
        self.keep_present(&window);
        self.call_back(&window)?;
        self.fill(&window, allowance, &mut idle)?;
        Ok(window)
    }

    fn allowance(&self, arena: u16, size: u64) -> Allowance {
        // The user may reset the peaks of the statistics; what the job once needed it will need again.
        let peak = self.stats.highest_active().max(self.stats.active_bytes() + size);
        let above = |thousandths: u32| peak.saturating_add(peak / 1000 * u64::from(thousandths));
        let config = &self.config;
        // New memory costs once, moving it again and again: what nothing has paid for buys some room.
        let paid_for = MOVES_IN_ADVANCE + self.clock / REQUESTS_PER_MOVE;
        let work = &self.stats.work;
        let unpaid = work.stitched.saturating_sub(paid_for);
        let to_settle = self.moves_to_settle.saturating_add(self.clock / REQUESTS_PER_MOVE);
        let unsettled = work.stitched.saturating_sub(to_settle);
        let share = |moves: u64, most: u32| (moves / MOVES_PER_THOUSANDTH).min(u64::from(most)) as u32;
        let bought = share(unpaid, config.slack_hurried) + share(unsettled, config.slack_unsettled);
        let slack = if self.is_retracing() { config.slack_moving } else { config.slack } + bought;
        let (mut quiet, wait) = (above(slack), above(config.slack_before_wait.max(slack)));
        if kind_of(arena) == KEPT {
            // What stays raises the peak of the step that has begun.
            quiet = quiet.max(above(config.slack_kept).min(quiet + size.next_multiple_of(PAGE)));
        }
        Allowance { quiet, wait, ahead: self.ahead(arena, peak) }
    }

    /// How much memory an arena whose pages are not expected to move may have before it is needed.
    fn ahead(&self, arena: u16, peak: u64) -> u64 {
        let total = self.config.limit.map_or(self.total, |limit| limit.min(self.total));
        if peak > total / 2 {
            // Memory may become short, and large pieces are moved less easily.
            return 0;
        }
        let most = (peak / 1000 * u64::from(self.config.ahead)).min(MOST_AHEAD);
        let (lane, kind) = (lane_of(arena), kind_of(arena));
        let ahead = match kind {
            KEPT => most,
            // Nothing moves before best fit alone has come to its end.
            LARGE if !self.is_retracing() => most,
            SMALL | RUNS => {
                most.min(self.space.mapped_in(&self.lanes[lane].arenas[kind].segments) / SMALL_SHARE)
            }
            _ => 0,
        };
        ahead / PAGE * PAGE
    }

    /// Puts memory into every empty page of the window.
    fn fill(&mut self, window: &Window, allowance: Allowance, idle: &mut Idle) -> Result<(), Shortage> {
        let (mut at, to) = window.pages();
        while at < to {
            if self.space.is_mapped(window.segment, at) {
                at += PAGE;
                continue;
            }
            let room = self.space.empty_from(window.segment, at, self.config.largest_handle);
            at += self.put_piece(window, at, room.min(to - at), room, allowance, idle)?;
        }
        Ok(())
    }

    /// Puts one piece of physical memory of at most `room` bytes at an empty place, where `want` bytes are needed;
    /// its size.
    fn put_piece(
        &mut self,
        window: &Window,
        at: Address,
        want: u64,
        room: u64,
        allowance: Allowance,
        idle: &mut Idle,
    ) -> Result<u64, Shortage> {
        if let Some(index) = self.space.spare.iter().position(|&(_, size)| size <= room) {
            let (handle, size) = self.space.spare.swap_remove(index);
            return self.put_new(window.segment, at, handle, size);
        }
        // Nothing is unmapped during a capture as long as memory can be made.
        let capturing = self.capturing();
        let after = self.space.physical + want;
        if capturing || after <= allowance.quiet {
            // What does not move comes in large pieces, and the next such block will want the rest.
            let whole = room.min(want + allowance.ahead);
            let ahead = allowance.ahead > 0 && !capturing && self.has_room(whole);
            let size = if ahead { whole } else { want.min(self.step()) };
            let created = if self.is_scarce(size) { Err(Shortage::Memory) } else { self.create(size) };
            match created {
                Err(Shortage::Memory) => {}
                Ok((handle, size)) => return self.put_new(window.segment, at, handle, size),
                Err(error) => return Err(error),
            }
        }
        loop {
            if let Some(id) = self.take_idle(window, room, idle) {
                return self.stitch(id, window.segment, at);
            }
            if capturing || after <= allowance.wait || idle.waited || !self.wait_for_idle(window) {
                break;
            }
            let lane = lane_of(self.space.segments[window.segment as usize].arena);
            self.begin_survey();
            *idle = Idle { waited: true, ..self.find_idle(Some(lane)) };
        }
        let (handle, size) = self.create(want.min(self.step()))?;
        self.put_new(window.segment, at, handle, size)
    }

    /// Maps a handle that is mapped nowhere at an empty place; its size. On failure it is kept as a spare.
    pub(super) fn put_new(
        &mut self,
        segment: u16,
        at: Address,
        handle: Handle,
        size: u64,
    ) -> Result<u64, Shortage> {
        self.stats.work.maps += 1;
        if let Err(error) = self.driver.map(at, size, handle) {
            self.space.spare.push((handle, size));
            return Err(error.into());
        }
        self.space.place(Piece { handle, size, at, segment });
        self.count_mapped(self.space.segments[segment as usize].arena, segment, size);
        // Memory that just came is as quiet as can be.
        self.occupy(segment, at, size, 0)?;
        Ok(size)
    }

    /// Whether so much new memory is within the heap's limit and not scarce.
    fn has_room(&mut self, want: u64) -> bool {
        self.space.physical.saturating_add(want) <= self.config.limit.unwrap_or(u64::MAX)
            && !self.is_scarce(want)
    }

    /// Whether so much new memory would leave the device with less than others in this process need now and
    /// then (kernels are loaded when they are first used). Then what is idle is used first.
    fn is_scarce(&mut self, want: u64) -> bool {
        let spared = self.spared(SPARED_MOST);
        self.beyond(spared).is_some_and(|room| room < want)
    }

    /// Bytes of the device that are left to others.
    fn spared(&self, most: u64) -> u64 {
        (self.total / 1000 * u64::from(self.config.spared)).min(most)
    }

    /// Bytes that even a heap without idle memory does not take; plain segments are the driver's to refuse.
    pub(super) fn left_to_others(&self) -> u64 {
        if self.plain { 0 } else { self.spared(LEFT_MOST) / PAGE * PAGE }
    }

    /// Free bytes of the device beyond those that are to be left, where they may not be ample.
    fn beyond(&mut self, least: u64) -> Option<u64> {
        if least == 0 {
            return None;
        }
        let physical = self.space.physical;
        // The driver is asked again when the heap itself may have used up a quarter of what was free.
        if self.seen.is_some_and(|(free, then)| free / 4 > least && physical <= then + free / 4) {
            return None;
        }
        let info = self.driver.memory_info().ok()?;
        self.seen = Some((info.free, physical));
        Some(info.free.saturating_sub(least))
    }

    /// Makes a piece of physical memory of at most `size` bytes.
    fn create(&mut self, mut size: u64) -> Result<(Handle, u64), Shortage> {
        let left = self.left_to_others();
        let room = self.beyond(left);
        loop {
            let limit = self.config.limit.unwrap_or(u64::MAX);
            let within = self.space.physical + size <= limit && room.is_none_or(|room| size <= room);
            let made = if within {
                self.stats.work.creates += 1;
                self.driver.create(size)
            } else {
                Err(DriverError::OutOfMemory)
            };
            match made {
                Ok(handle) => {
                    self.space.physical += size;
                    return Ok((handle, size));
                }
                // The last bytes of a device go in small pieces.
                Err(DriverError::OutOfMemory) if size > PAGE => size = (size / 2).next_multiple_of(PAGE),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// How large a piece that may move may be: it moves as a whole, so it stays small against what is held.
    fn step(&self) -> u64 {
        let share = (self.space.physical / self.config.pieces.max(1) / PAGE).max(1);
        ((1 << share.ilog2()) * PAGE).min(self.config.largest_handle).max(PAGE)
    }

    pub(super) fn may_take_from(&self, lane: usize) -> bool {
        let lane = &self.lanes[lane];
        lane.in_use && self.pools.open(lane.pool)
    }

    /// Statistics of `size` bytes that came to a segment.
    pub(super) fn count_mapped(&mut self, arena: u16, segment: u16, size: u64) {
        self.stats.reserved_bytes.add(part_of(arena), size);
        if self.space.segments[segment as usize].mapped == size {
            self.stats.segment.add(part_of(arena), 1);
        }
    }

    pub(super) fn uncount_mapped(&mut self, arena: u16, segment: u16, size: u64) {
        self.stats.reserved_bytes.sub(part_of(arena), size);
        if self.space.segments[segment as usize].mapped == 0 {
            self.stats.segment.sub(part_of(arena), 1);
        }
    }

    /// A new segment for the arena; the window is its beginning.
    pub(super) fn new_segment(&mut self, arena: u16, size: u64) -> Result<Window, Shortage> {
        let kind = kind_of(arena);
        let least = size.next_multiple_of(PAGE);
        let first = self.lanes.iter().all(|lane| lane.arenas[kind].segments.is_empty());
        let usual = match kind {
            SMALL | RUNS => SMALL_SEGMENT,
            // Most jobs use one stream: it gets addresses for more than the device has.
            _ if first => self.total.saturating_mul(2),
            _ => self.total / 2,
        };
        let usual = least.max(usual.next_multiple_of(PAGE));
        let segment = match self.space.abandoned(part_of(arena), least) {
            Some(segment) => {
                self.space.segments[segment as usize].in_use = true;
                segment
            }
            None => {
                let (region, base, size) = self.addresses(kind, usual, least)?;
                let added = self.space.add_segment(base, size, region, false);
                added.ok_or(Shortage::Driver(DriverError::Unsupported("more segments")))?
            }
        };
        let entry = &mut self.space.segments[segment as usize];
        entry.arena = arena;
        let (base, bytes) = (entry.base, entry.size);
        let place = (segment, entry.region);
        let id = self.blocks.first(base, bytes, place, arena, State::Unmapped);
        self.space.segments[segment as usize].first = id;
        self.lanes[lane_of(arena)].arenas[kind].segments.push(segment);
        self.list_unmapped(arena, id);
        Ok(Window { segment, from: base, to: base + size })
    }

    /// Addresses for a segment of `usual` bytes, or at least `least`: cut from a region, made if need be.
    fn addresses(&mut self, kind: usize, usual: u64, least: u64) -> Result<(usize, Address, u64), Shortage> {
        if let Some((region, at)) = self.space.cut(part_for(kind), usual) {
            return Ok((region, at, usual));
        }
        let region = match kind {
            SMALL | RUNS => SMALL_REGION,
            _ => self.config.region.unwrap_or(self.total.saturating_mul(4)),
        };
        let mut size = usual.max(region.next_multiple_of(PAGE));
        loop {
            self.stats.work.reserves += 1;
            match self.driver.reserve(size) {
                Ok(base) => {
                    AddressSpace::add(base, size, self.config.device);
                    self.space.add_region(base, size, part_for(kind), false);
                    let segment = usual.min(size);
                    let cut = self.space.cut(part_for(kind), segment);
                    let (region, at) = cut.ok_or(Shortage::Memory)?;
                    return Ok((region, at, segment));
                }
                // Address space may be limited (ulimit -v).
                Err(_) if size > least => size = (size / 2).max(least).next_multiple_of(PAGE),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A plain segment of the sizes that PyTorch uses.
    fn grow_plain(&mut self, arena: u16, size: u64) -> Result<(), Shortage> {
        let kind = kind_of(arena);
        let bytes = match kind {
            SMALL | RUNS => size.next_multiple_of(PAGE),
            _ if size < 10 << 20 => 20 << 20,
            _ => size.next_multiple_of(PAGE),
        };
        if self.space.physical + bytes > self.config.limit.unwrap_or(u64::MAX) {
            return Err(Shortage::Memory);
        }
        self.stats.work.creates += 1;
        let base = self.driver.allocate(bytes)?;
        let region = self.space.add_region(base, bytes, part_for(kind), true);
        let Some(segment) = self.space.add_segment(base, bytes, region, true) else {
            self.driver.deallocate(base, bytes)?;
            return Err(Shortage::Driver(DriverError::Unsupported("more segments")));
        };
        AddressSpace::add(base, bytes, self.config.device);
        let id = self.blocks.first(base, bytes, (segment, region as u16), arena, State::Free);
        let entry = &mut self.space.segments[segment as usize];
        (entry.arena, entry.first, entry.mapped) = (arena, id, bytes);
        self.lanes[lane_of(arena)].arenas[kind].segments.push(segment);
        self.space.physical += bytes;
        self.count_mapped(arena, segment, bytes);
        self.bin(arena, id);
        Ok(())
    }
}
