//! Growth: where an arena gets memory that it does not have.
//!
//! A *window* is the place in the arena's addresses where the request will lie: a run of free and unmapped
//! ranges that needs the fewest pages. Its pages come from handles that lie idle elsewhere (they are
//! unmapped there and mapped here: *stitching*) or are made anew. Moving costs what making costs, but
//! keeps physical memory as small as what is in use; making up to a small slack above the peak of use
//! leaves room for a steady state in which neither happens.
//!
//! It knows when a page is quiet, not why the request failed. Invariants: only whole handles inside free,
//! quiet ranges move; a driver call that fails leaves the books as the driver has them.

use super::arena::{PLANNED, RUNS, part_for};
use super::block::{Id, NONE, State};
use super::segment::{HandleId, PAGE, Piece};
use super::stats::SMALL;
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

/// Where a request will lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub segment: u16,
    /// Memory in here is not taken to fill it.
    pub from: Address,
    pub to: Address,
    /// The first range without memory, and where mapping begins in it.
    pub unmapped: Id,
    pub map_from: Address,
}

/// How much physical memory may be made before idle pages are moved instead; bytes.
#[derive(Clone, Copy)]
struct Allowance {
    /// Before quiet pages are moved.
    quiet: u64,
    /// Before the host waits for pages to become quiet.
    wait: u64,
}

/// How much an idle page will be missed: planned places more than others, then by age.
type Cost = (bool, u64);

/// Windows are looked for among this many unmapped ranges of an arena.
const CANDIDATES: usize = 512;
/// Addresses of one segment for small requests; bytes.
const SMALL_SEGMENT: u64 = 1 << 30;
/// Reservations are made of this size at least, if the addresses are to be had; bytes.
const SMALL_REGION: u64 = 16 << 30;

/// Moves of memory that are free, so that a job that only warms up is packed tightly.
const MOVES_IN_ADVANCE: u64 = 256;
/// Requests that pay for one more move (about 60 µs on an H200, where a request of a training job comes
/// every 20 µs or so): moving stays at some 2 % of the job's time at most, however it allocates.
const REQUESTS_PER_MOVE: u64 = 64;
/// Unpaid moves after which physical memory may grow by another thousandth of the peak.
const MOVES_PER_THOUSANDTH: u64 = 16;

impl<D: Driver> Heap<D> {
    /// Gives the arena a free range of at least `size` bytes.
    pub(super) fn grow(&mut self, arena: u16, size: u64) -> Result<(), Shortage> {
        if self.plain {
            return self.grow_plain(arena, size);
        }
        let window = match self.best_window(arena, size) {
            Some(window) => window,
            None => self.new_segment(arena, size)?,
        };
        self.fill(window, size)
    }

    fn allowance(&self, size: u64) -> Allowance {
        let active = &self.stats.active_bytes;
        let peak = active.peak().max(active.now() + size);
        let above = |thousandths: u32| peak.saturating_add(peak / 1000 * u64::from(thousandths));
        // Moving memory costs the job time in every step that needs it; new memory costs once. So moves that
        // nothing has paid for buy room, little by little, until they cease.
        let overdraft = self.stats.work.stitched.saturating_sub(self.moves_paid_for());
        let bought = (overdraft / MOVES_PER_THOUSANDTH).min(u64::from(self.config.slack_hurried)) as u32;
        Allowance {
            quiet: above(self.config.slack + bought),
            wait: above(self.config.slack_before_wait + bought),
        }
    }

    /// How many moves of memory the requests served so far have paid for.
    fn moves_paid_for(&self) -> u64 {
        MOVES_IN_ADVANCE + self.clock / REQUESTS_PER_MOVE
    }

    /// The window that needs the fewest pages; of equals the one whose unmapped range is smallest.
    fn best_window(&self, arena: u16, size: u64) -> Option<Window> {
        let unmapped = &self.lanes[lane_of(arena)].arenas[kind_of(arena)].unmapped;
        let mut best: Option<(u64, u64, Window)> = None;
        for &id in unmapped.iter().take(CANDIDATES) {
            let room = self.blocks[id].size;
            let found = [self.window_from_left(id, size), self.window_from_right(id, size)];
            for (missing, window) in found.into_iter().flatten() {
                if best.is_none_or(|(least, smallest, _)| (missing, room) < (least, smallest)) {
                    best = Some((missing, room, window));
                }
            }
        }
        best.map(|(_, _, window)| window)
    }

    /// A window that begins at the free range before `id`, or at `id`, and runs to the right.
    fn window_from_left(&self, id: Id, size: u64) -> Option<(u64, Window)> {
        let block = &self.blocks[id];
        let before = block.prev;
        let start = if before != NONE && self.blocks[before].state == State::Free {
            self.blocks[before].addr
        } else {
            block.addr
        };
        let to = start.checked_add(size)?;
        let mut missing = 0;
        let mut at = id;
        loop {
            let here = &self.blocks[at];
            match here.state {
                State::Unmapped => {
                    let needed = (to - here.addr).next_multiple_of(PAGE);
                    missing += needed.min(here.size);
                }
                State::Free => {}
                _ => return None,
            }
            if here.end() >= to {
                let segment = block.segment;
                let window = Window { segment, from: start, to, unmapped: id, map_from: block.addr };
                return Some((missing, window));
            }
            at = here.next;
            if at == NONE {
                return None;
            }
        }
    }

    /// A window that ends with the free range after `id` and takes only the end of `id`.
    fn window_from_right(&self, id: Id, size: u64) -> Option<(u64, Window)> {
        let block = &self.blocks[id];
        let next = block.next;
        if next == NONE || self.blocks[next].state != State::Free {
            return None;
        }
        let after = &self.blocks[next];
        let missing = size.saturating_sub(after.size).next_multiple_of(PAGE);
        if missing == 0 || missing > block.size {
            return None;
        }
        let map_from = block.end() - missing;
        let window =
            Window { segment: block.segment, from: map_from, to: after.end(), unmapped: id, map_from };
        Some((missing, window))
    }

    /// Puts memory into every unmapped part of the window.
    pub(super) fn fill(&mut self, window: Window, size: u64) -> Result<(), Shortage> {
        self.retire_all_empty_slabs();
        self.look();
        self.mark();
        self.look();
        let allowance = self.allowance(size);
        let before = self.stats.work.stitched;
        let filled = self.fill_within(window, allowance);
        let moved = self.stats.work.stitched - before;
        if moved > 0 {
            let arena = self.space.segments[window.segment as usize].arena;
            self.note_moves(lane_of(arena), moved);
        }
        filled
    }

    fn fill_within(&mut self, window: Window, allowance: Allowance) -> Result<(), Shortage> {
        let Window { mut unmapped, map_from: mut from, to, .. } = window;
        let mut waited = false;
        loop {
            let room = self.blocks[unmapped].end() - from;
            let want = room.min((to - from).next_multiple_of(PAGE));
            let (handle, size) = self.piece_for(&window, want, room, allowance, &mut waited)?;
            unmapped = match self.unmapped_with(unmapped, from, window.segment) {
                Some(id) => id,
                None => {
                    self.space.spare.push((handle, size));
                    return Err(Shortage::Memory);
                }
            };
            let free = self.map_into(unmapped, from, handle, size)?;
            if self.blocks[free].end() >= to {
                return Ok(());
            }
            unmapped = self.blocks[free].next;
            from = self.blocks[unmapped].addr;
        }
    }

    /// The unmapped range that holds `from`: `id`, unless it was joined with a neighbour whose page was
    /// taken away meanwhile.
    fn unmapped_with(&self, id: Id, from: Address, segment: u16) -> Option<Id> {
        let holds = |&id: &Id| {
            let block = &self.blocks[id];
            block.state == State::Unmapped && block.addr <= from && from < block.end()
        };
        if holds(&id) {
            return Some(id);
        }
        let arena = self.space.segments[segment as usize].arena;
        let unmapped = &self.lanes[lane_of(arena)].arenas[kind_of(arena)].unmapped;
        unmapped.iter().copied().find(holds)
    }

    /// One piece of physical memory of at most `room` bytes, mapped nowhere.
    fn piece_for(
        &mut self,
        window: &Window,
        want: u64,
        room: u64,
        allowance: Allowance,
        waited: &mut bool,
    ) -> Result<(Handle, u64), Shortage> {
        if let Some(index) = self.space.spare.iter().position(|&(_, size)| size <= room) {
            return Ok(self.space.spare.swap_remove(index));
        }
        // Nothing is unmapped during a capture as long as memory can be made.
        let capturing = self.capturing();
        let after = self.space.physical + want;
        if capturing || after <= allowance.quiet {
            match self.create(want) {
                Err(Shortage::Memory) => {}
                done => return done,
            }
        }
        if let Some((id, piece)) = self.victim(Some(window), room, true) {
            return self.take_away(id, piece);
        }
        if !capturing && after > allowance.wait && !*waited {
            *waited = true;
            if let Some((id, _)) = self.victim(Some(window), room, false) {
                let lane = lane_of(self.blocks[id].arena);
                let quiet = if self.lanes[lane].loud { self.wait_device() } else { self.hush() };
                if quiet && let Some((id, piece)) = self.victim(Some(window), room, true) {
                    return self.take_away(id, piece);
                }
            }
        }
        self.create(want)
    }

    /// Makes a piece of physical memory of at most `want` bytes.
    fn create(&mut self, want: u64) -> Result<(Handle, u64), Shortage> {
        let mut size = want.min(self.step());
        loop {
            let limit = self.config.limit.unwrap_or(u64::MAX);
            let within = self.space.physical + size <= limit;
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

    /// How large a piece may be: pieces move as a whole, so they stay small against what is held.
    fn step(&self) -> u64 {
        let share = (self.space.physical / 512 / PAGE).max(1);
        ((1 << share.ilog2()) * PAGE).min(self.config.largest_handle).max(PAGE)
    }

    pub(super) fn may_take_from(&self, lane: usize) -> bool {
        let lane = &self.lanes[lane];
        lane.in_use && self.pools.open(lane.pool)
    }

    /// The idle handle that will be missed least: the free range and the piece in it. With `quiet` only
    /// one that no work can be using.
    pub(super) fn victim(
        &self,
        window: Option<&Window>,
        largest: u64,
        quiet: bool,
    ) -> Option<(Id, (HandleId, Piece))> {
        let mut best: Option<(Cost, Id, (HandleId, Piece))> = None;
        for (index, lane) in self.lanes.iter().enumerate() {
            if !self.may_take_from(index) || (quiet && lane.loud) {
                continue;
            }
            for (kind, arena) in lane.arenas.iter().enumerate() {
                for id in arena.bins.at_least(&self.blocks, PAGE) {
                    let block = &self.blocks[id];
                    // What lay idle longest goes first. Planned places go last, and of them the one that was
                    // used just now: it is the one that will be needed latest.
                    let cost = match kind {
                        PLANNED => (true, self.clock - block.word),
                        _ => (false, block.word),
                    };
                    let cheaper = best.is_none_or(|(least, ..)| cost < least);
                    if !cheaper || (quiet && block.word > self.marks.quiet) {
                        continue;
                    }
                    // What lies in the window is spared, what lies beside it is not.
                    let (from, to) = match window {
                        Some(window) if window.segment == block.segment => (window.from, window.to),
                        _ => (block.end(), block.end()),
                    };
                    let beside = [(block.addr, block.end().min(from)), (block.addr.max(to), block.end())];
                    let within = beside.into_iter().find_map(|(from, to)| {
                        if from < to {
                            self.space.piece_within(block.segment, from, to, largest)
                        } else {
                            None
                        }
                    });
                    if let Some(piece) = within {
                        best = Some((cost, id, piece));
                    }
                }
            }
        }
        best.map(|(_, id, piece)| (id, piece))
    }

    /// Takes a victim's piece from where it lies, to be mapped elsewhere.
    fn take_away(&mut self, id: Id, piece: (HandleId, Piece)) -> Result<(Handle, u64), Shortage> {
        let Piece { handle, size, .. } = piece.1;
        self.unmap_piece(id, piece)?;
        self.stats.work.stitched += 1;
        self.stats.work.stitched_bytes += size;
        Ok((handle, size))
    }

    /// Unmaps a piece that lies in the free range `id`.
    pub(super) fn unmap_piece(&mut self, id: Id, piece: (HandleId, Piece)) -> Result<(), DriverError> {
        let (handle, Piece { at, size, .. }) = piece;
        self.stats.work.unmaps += 1;
        self.driver.unmap(at, size)?;
        self.space.displace(handle);
        let arena = self.blocks[id].arena;
        self.uncount_mapped(arena, self.blocks[id].segment, size);
        self.unbin(arena, id);
        let mut middle = id;
        if self.blocks[id].addr < at {
            middle = self.blocks.split(id, at - self.blocks[id].addr);
            self.bin(arena, id);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            self.bin(arena, rest);
        }
        self.lose(arena, middle);
        Ok(())
    }

    /// Makes a range in no list unmapped and joins it with unmapped neighbours.
    fn lose(&mut self, arena: u16, id: Id) {
        let list = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
        if next != NONE && self.blocks[next].state == State::Unmapped {
            list.remove_unmapped(&mut self.blocks, next);
            self.blocks.absorb(id, next);
        }
        if prev != NONE && self.blocks[prev].state == State::Unmapped {
            self.blocks.absorb(prev, id);
        } else {
            list.add_unmapped(&mut self.blocks, id);
        }
    }

    /// Maps a handle at `from` in the unmapped range `id`; returns the free range that it became part of.
    /// On failure the handle is kept as a spare.
    fn map_into(&mut self, id: Id, from: Address, handle: Handle, size: u64) -> Result<Id, Shortage> {
        self.stats.work.maps += 1;
        if let Err(error) = self.driver.map(from, size, handle) {
            self.space.spare.push((handle, size));
            return Err(error.into());
        }
        let (arena, segment) = (self.blocks[id].arena, self.blocks[id].segment);
        let list = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let mut middle = id;
        if from > self.blocks[id].addr {
            middle = self.blocks.split(id, from - self.blocks[id].addr);
        } else {
            list.remove_unmapped(&mut self.blocks, id);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            list.add_unmapped(&mut self.blocks, rest);
        }
        self.space.place(Piece { handle, size, at: from, segment });
        self.count_mapped(arena, segment, size);
        // Memory that just came is as quiet as can be.
        Ok(self.release_range(middle, 0))
    }

    /// Statistics of `size` bytes that came to a segment.
    fn count_mapped(&mut self, arena: u16, segment: u16, size: u64) {
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
            PLANNED => least,
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
        let id = self.blocks.first(base, bytes, segment, arena, State::Unmapped);
        self.space.segments[segment as usize].first = id;
        let list = &mut self.lanes[lane_of(arena)].arenas[kind];
        list.segments.push(segment);
        list.add_unmapped(&mut self.blocks, id);
        Ok(Window { segment, from: base, to: base + size, unmapped: id, map_from: base })
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
        let id = self.blocks.first(base, bytes, segment, arena, State::Free);
        let entry = &mut self.space.segments[segment as usize];
        (entry.arena, entry.first, entry.mapped) = (arena, id, bytes);
        self.lanes[lane_of(arena)].arenas[kind].segments.push(segment);
        self.space.physical += bytes;
        self.count_mapped(arena, segment, bytes);
        self.bin(arena, id);
        Ok(())
    }
}
