//! Growth: where an arena gets memory that it does not have.
//!
//! A request for which no free range is large enough gets a [`Window`] of addresses. Its pages are handles
//! that lie idle elsewhere, or are made anew. A handle that is needed elsewhere is mapped there too and
//! keeps its old mapping as a *shadow* (on a device without such aliases it is unmapped first: both are
//! called *stitching*). A window that lies in the shadows of idle handles costs no driver call: so a job
//! that repeats itself soon finds all the mappings that it needs.
//!
//! It knows when a page is quiet, not why the request failed. Invariants: only whole handles inside free
//! ranges move, and quiet ones unless they stay with their stream; a driver call that fails leaves the
//! books as the driver has them.

use super::arena::{RUNS, part_for};
use super::block::{Id, NONE, State};
use super::segment::{Found, HandleId, PAGE, Piece, Shadow};
use super::stats::SMALL;
use super::trail::Trail;
use super::window::Window;
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
}

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
        self.grow_somewhere(arena, size, &[]).map(drop)
    }

    /// The same; where the request is to lie. Not for plain segments.
    pub(super) fn grow_somewhere(&mut self, arena: u16, size: u64, places: &[Address]) -> Result<Window, Shortage> {
        self.retire_all_empty_slabs();
        for lane in 0..self.lanes.len() {
            if self.may_take_from(lane) {
                self.look(lane);
                self.mark(lane);
                self.look(lane);
            }
        }
        self.survey += 1;
        self.find_wanted(lane_of(arena));
        self.survey -= 1;
        let mut idle = self.find_idle(Some(lane_of(arena)));
        let trailed = self.lanes[lane_of(arena)].trail.is_some();
        let own = places.first().copied().unwrap_or(0);
        let window = match self.best_place(arena, size, places) {
            Some(window) => window,
            None => match self.best_window(arena, size, trailed, own) {
                Some(window) => window,
                None => self.new_segment(arena, size)?,
            },
        };
        self.call_back(&window)?;
        self.fill(&window, size, &mut idle)?;
        Ok(window)
    }

    fn allowance(&self, size: u64) -> Allowance {
        let active = &self.stats.active_bytes;
        let peak = active.peak().max(active.now() + size);
        let above = |thousandths: u32| peak.saturating_add(peak / 1000 * u64::from(thousandths));
        // Moving memory costs the job time in every step that needs it; new memory costs once. So moves that
        // nothing has paid for buy room, little by little, until they cease.
        let overdraft = self.stats.work.stitched.saturating_sub(self.moves_paid_for());
        let slack = if self.huge_from == u64::MAX { self.config.slack.min(var("PRE",1000) as u32) } else { self.config.slack.min(var("SLACK",1000) as u32)};
        let bought = (overdraft / MOVES_PER_THOUSANDTH).min(var("HURRY",0)) as u32;
        Allowance {
            quiet: above(slack + bought),
            wait: above(self.config.slack_before_wait + bought),
        }
    }

    /// How many moves of memory the requests served so far have paid for.
    fn moves_paid_for(&self) -> u64 {
        MOVES_IN_ADVANCE + self.clock / REQUESTS_PER_MOVE
    }

    /// Calls handles back to their shadows in the window.
    pub(super) fn call_back(&mut self, window: &Window) -> Result<(), Shortage> {
        let (mut at, to) = window.pages();
        for at in (at..to).step_by(PAGE as usize) {
            if let Some((id, _)) = self.space.piece_at(window.segment, at) {
                self.space.note_idle(id, 0);
            }
        }
        while at < to {
            if let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) {
                if self.space.is_idle(id, self.survey) {
                    self.stats.work.called_back += 1;
                    self.bring(id, window.segment, shadow.at)?;
                } else {
                    self.unmap_shadow(id, shadow)?;
                }
                at = shadow.at + piece.size;
            } else {
                at += PAGE;
            }
        }
        Ok(())
    }

    /// Puts memory into every empty page of the window.
    fn fill(&mut self, window: &Window, size: u64, idle: &mut Vec<HandleId>) -> Result<(), Shortage> {
        let mut allowance = self.allowance(size);
        if kind_of(self.space.segments[window.segment as usize].arena) == super::arena::KEPT {
            allowance.quiet += (self.stats.active_bytes.peak() / 200).min(size.next_multiple_of(PAGE));
        }
        let (mut at, to) = window.pages();
        let mut waited = false;
        while at < to {
            if self.space.is_mapped(window.segment, at) {
                at += PAGE;
                continue;
            }
            let room = self.space.empty_from(window.segment, at, self.config.largest_handle);
            let want = room.min(to - at);
            at += self.put_piece(window, at, want, room, allowance, idle, &mut waited)?;
        }
        Ok(())
    }

    /// Puts one piece of physical memory of at most `room` bytes at an empty place; its size.
    #[allow(clippy::too_many_arguments)]
    fn put_piece(
        &mut self,
        window: &Window,
        at: Address,
        want: u64,
        room: u64,
        allowance: Allowance,
        idle: &mut Vec<HandleId>,
        waited: &mut bool,
    ) -> Result<u64, Shortage> {
        if let Some(index) = self.space.spare.iter().position(|&(_, size)| size <= room) {
            let (handle, size) = self.space.spare.swap_remove(index);
            return self.put_new(window.segment, at, handle, size);
        }
        // Nothing is unmapped during a capture as long as memory can be made.
        let capturing = self.capturing();
        let after = self.space.physical + want;
        if capturing || after <= allowance.quiet {
            match self.create(want) {
                Err(Shortage::Memory) => {}
                Ok((handle, size)) => return self.put_new(window.segment, at, handle, size),
                Err(error) => return Err(error),
            }
        }
        loop {
            if let Some(id) = self.take_idle(window, room, idle) {
                return self.stitch(id, window.segment, at);
            }
            if capturing || after <= allowance.wait || *waited || !self.wait_for_idle(window) {
                break;
            }
            *waited = true;
            let lane = lane_of(self.space.segments[window.segment as usize].arena);
            *idle = self.find_idle(Some(lane));
        }
        let (handle, size) = self.create(want)?;
        self.put_new(window.segment, at, handle, size)
    }

    /// Waits on the host until the handle that is idle longest is quiet; false if there is none or it could
    /// not be waited for.
    fn wait_for_idle(&mut self, window: &Window) -> bool {
        let mut oldest: Option<(u64, usize)> = None;
        for lane in 0..self.lanes.len() {
            if !self.may_take_from(lane) {
                continue;
            }
            for arena in &self.lanes[lane].arenas {
                for id in arena.bins.at_least(&self.blocks, PAGE) {
                    let block = &self.blocks[id];
                    let outside = block.segment != window.segment || block.end() <= window.from || block.addr >= window.to;
                    if outside && oldest.is_none_or(|(word, _)| block.word < word) {
                        oldest = Some((block.word, lane));
                    }
                }
            }
        }
        let Some((_, lane)) = oldest else { return false };
        if self.lanes[lane].loud { self.wait_device() } else { self.hush(lane) }
    }

    /// Notes which handles will be wanted while the latest request is there.
    fn find_wanted(&mut self, lane: usize) {
        let Some(trail) = self.lanes[lane].trail.take() else { return };
        for (at, size) in trail.rivals() {
            if size < PAGE { continue }
            let segments = self.lanes[lane].arenas.iter().flat_map(|arena| &arena.segments);
            let holds = |&&index: &&u16| {
                let segment = &self.space.segments[index as usize];
                (segment.base..segment.end()).contains(&at)
            };
            if let Some(&segment) = segments.into_iter().find(holds) {
                self.space.note_wanted(segment, at, at + size, self.survey);
            }
        }
        self.lanes[lane].trail = Some(trail);
    }

    /// Finds all handles that lie idle and may be taken: for `lane` (which needs no quiet for its own, if
    /// they need not be unmapped), or to be destroyed. The one that will be missed least comes last.
    pub(super) fn find_idle(&mut self, lane: Option<usize>) -> Vec<HandleId> {
        self.survey += 1;
        let mut found: Vec<(u64, HandleId)> = Vec::new();
        for index in 0..self.lanes.len() {
            if !self.may_take_from(index) {
                continue;
            }
            let own = self.aliases && lane == Some(index);
            let lane = &self.lanes[index];
            if !own && lane.loud {
                continue;
            }
            for arena in &lane.arenas {
                for id in arena.bins.at_least(&self.blocks, PAGE) {
                    let block = &self.blocks[id];
                    if !own && block.word > lane.marks.quiet {
                        continue;
                    }
                    let mut at = block.addr.next_multiple_of(PAGE);
                    while at + PAGE <= block.end()
                        && let Some((id, piece)) = self.space.piece_at(block.segment, at)
                    {
                        if piece.at >= block.addr && piece.at + piece.size <= block.end() {
                            self.space.note_idle(id, self.survey);
                            found.push((block.word, id));
                        }
                        at = piece.at + piece.size;
                    }
                }
            }
        }
        if var("WANT",1)==1 { found.sort_by_key(|&(word,id)| (!self.space.wanted(id,self.survey), std::cmp::Reverse(word))) } else { match var("ORDER",0) { 0=>found.sort_by_key(|&(word, _)| std::cmp::Reverse(word)), 1=>found.sort_by_key(|&(word, _)| word), 2=> found.sort_by_key(|&(word,id)| (std::cmp::Reverse(self.space.shadows_of(id).len()),std::cmp::Reverse(word))), _=>found.sort_by_key(|&(word,id)| (std::cmp::Reverse(self.space.shadows_of(id).len()),word))  } }
        found.into_iter().map(|(_, id)| id).collect()
    }

    /// The idle handle that will be missed least, of at most `largest` bytes and outside the window.
    fn take_idle(&mut self, window: &Window, largest: u64, idle: &mut Vec<HandleId>) -> Option<HandleId> {
        let (from, to) = window.pages();
        let place = idle.iter().rposition(|&id| {
            self.space.is_idle(id, self.survey)
                && self.space.piece(id).is_some_and(|piece| {
                    let inside = piece.segment == window.segment && piece.at < to && from < piece.at + piece.size;
                    piece.size <= largest && !inside
                })
        })?;
        Some(idle.remove(place))
    }

    /// Maps an idle handle at an empty place; its size.
    fn stitch(&mut self, id: HandleId, segment: u16, at: Address) -> Result<u64, Shortage> {
        let Some(Piece { handle, size, .. }) = self.space.piece(id) else { return Err(Shortage::Memory) };
        if self.aliases {
            self.stats.work.maps += 1;
            self.driver.map(at, size, handle)?;
            self.bring(id, segment, at)?;
        } else {
            self.unmap_piece(id)?;
            self.put_new(segment, at, handle, size)?;
        }
        self.stats.work.stitched += 1;
        self.stats.work.stitched_bytes += size;
        let lane = lane_of(self.space.segments[segment as usize].arena);
        if self.stats.work.stitched_bytes >= self.space.physical / 100 * var("ACT",100) {
            self.huge_from = var("HUGE", 8 << 20);
            self.lanes[lane].trail.get_or_insert_with(|| Box::new(Trail::new()));
        }
        Ok(size)
    }

    /// Makes an idle handle present where it is mapped, too.
    fn bring(&mut self, id: HandleId, segment: u16, at: Address) -> Result<(), Shortage> {
        let Some(Piece { size, .. }) = self.space.piece(id) else { return Err(Shortage::Memory) };
        let Some((left, clock)) = self.vacate(id) else { return Err(Shortage::Memory) };
        self.space.note_idle(id, 0);
        self.space.shift(id, segment, at, clock);
        let arena = self.space.segments[segment as usize].arena;
        self.uncount_mapped(left.0, left.1, size);
        // What stays with its stream is as quiet as it was; what comes from another stream is quiet.
        let same = lane_of(left.0) == lane_of(arena);
        self.occupy(segment, at, size, if same { clock } else { 0 })
    }

    /// Turns the free range of a handle into one without memory: its arena and segment, and the clock at the
    /// last free in it.
    fn vacate(&mut self, id: HandleId) -> Option<((u16, u16), u64)> {
        let Piece { at, size, segment, .. } = self.space.piece(id)?;
        let block = self.holder(segment, at).filter(|&id| self.blocks[id].state == State::Free)?;
        let (arena, clock) = (self.blocks[block].arena, self.blocks[block].word);
        self.unbin(arena, block);
        let mut middle = block;
        if self.blocks[block].addr < at {
            middle = self.blocks.split(block, at - self.blocks[block].addr);
            self.bin(arena, block);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            self.bin(arena, rest);
        }
        self.lose(arena, middle);
        Some(((arena, segment), clock))
    }

    /// Turns a range without memory into a free one.
    fn occupy(&mut self, segment: u16, at: Address, size: u64, clock: u64) -> Result<(), Shortage> {
        let arena = self.space.segments[segment as usize].arena;
        let unmapped = self.holder(segment, at).filter(|&id| self.blocks[id].state == State::Unmapped);
        let Some(id) = unmapped else { return Err(Shortage::Memory) };
        let list = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let mut middle = id;
        if at > self.blocks[id].addr {
            middle = self.blocks.split(id, at - self.blocks[id].addr);
        } else {
            list.remove_unmapped(&mut self.blocks, id);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            list.add_unmapped(&mut self.blocks, rest);
        }
        self.count_mapped(arena, segment, size);
        self.release_range(middle, clock);
        Ok(())
    }

    /// Maps a handle that is mapped nowhere at an empty place; its size. On failure it is kept as a spare.
    fn put_new(&mut self, segment: u16, at: Address, handle: Handle, size: u64) -> Result<u64, Shortage> {
        self.stats.work.maps += 1;
        if let Err(error) = self.driver.map(at, size, handle) {
            self.space.spare.push((handle, size));
            return Err(error.into());
        }
        self.space.place(Piece { handle, size, at, segment });
        // Memory that just came is as quiet as can be.
        self.occupy(segment, at, size, 0)?;
        Ok(size)
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
        let share = (self.space.physical / var("SHARE",512) / PAGE).max(1);
        ((1 << share.ilog2()) * PAGE).min(self.config.largest_handle).max(PAGE)
    }

    pub(super) fn may_take_from(&self, lane: usize) -> bool {
        let lane = &self.lanes[lane];
        lane.in_use && self.pools.open(lane.pool)
    }

    /// Unmaps an idle handle everywhere. What is left of it on failure stays as it was.
    pub(super) fn unmap_piece(&mut self, id: HandleId) -> Result<(), DriverError> {
        for shadow in self.space.shadows_of(id).to_vec() {
            self.unmap_shadow(id, shadow)?;
        }
        let Some(Piece { at, size, .. }) = self.space.piece(id) else { return Ok(()) };
        self.stats.work.unmaps += 1;
        self.driver.unmap(at, size)?;
        if let Some((left, _)) = self.vacate(id) {
            self.space.displace(id);
            self.uncount_mapped(left.0, left.1, size);
        }
        Ok(())
    }

    pub(super) fn unmap_shadow(&mut self, id: HandleId, shadow: Shadow) -> Result<(), DriverError> {
        let Some(Piece { size, .. }) = self.space.piece(id) else { return Ok(()) };
        self.stats.work.unmaps += 1;
        self.driver.unmap(shadow.at, size)?;
        self.space.fade(id, shadow);
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

    /// The block of a segment that an address lies in.
    pub(super) fn holder(&self, segment: u16, at: Address) -> Option<Id> {
        let entry = &self.space.segments[segment as usize];
        let mut id = match self.space.find_before(segment, at, true) {
            Found::Block(id) => id,
            Found::Slab(slab) => self.slabs[slab].block,
            Found::Nothing => entry.first,
        };
        while self.blocks[id].end() <= at {
            id = self.blocks[id].next;
            if id == NONE {
                return None;
            }
        }
        Some(id)
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

pub(crate) fn var(name:&str,default:u64)->u64{ use std::sync::OnceLock; use std::collections::HashMap; use std::sync::Mutex; static M:OnceLock<Mutex<HashMap<String,u64>>>=OnceLock::new(); *M.get_or_init(Default::default).lock().unwrap().entry(name.to_owned()).or_insert_with(||std::env::var(name).ok().and_then(|v|v.parse().ok()).unwrap_or(default)) }
