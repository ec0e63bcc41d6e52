//! Giving back: idle memory to the device, what is left of a pool, and everything at the heap's end.
//!
//! It knows which memory is idle and quiet, not why it should go. Invariant: a handle that could not be
//! destroyed is kept as a spare, and used or destroyed later.

use super::arena::{Arena, Lane};
use super::block::State;
use super::segment::{HandleId, Piece, Shadow};
use super::{AddressSpace, Driver, Handle, Heap, kind_of, lane_of};

impl<D: Driver> Heap<D> {
    /// Destroys every idle handle of the lanes whose memory may be taken, as far as it is quiet.
    pub(super) fn give_back(&mut self) -> u64 {
        let mut bytes = 0;
        for (handle, size) in std::mem::take(&mut self.space.spare) {
            bytes += self.destroy(handle, size);
        }
        if self.plain {
            return bytes + self.give_back_plain();
        }
        self.begin_survey();
        for (_, id) in self.find_idle(None).handles {
            let Some(Piece { handle, size, .. }) = self.space.piece(id) else { continue };
            if !self.has_quiet_shadows(id) {
                continue;
            }
            if self.unmap_piece(id).is_err() {
                break;
            }
            bytes += self.destroy(handle, size);
        }
        bytes
    }

    /// Whether no work can be using a handle's old addresses any more.
    fn has_quiet_shadows(&self, id: HandleId) -> bool {
        self.space.shadows_of(id).iter().all(|&shadow| self.is_quiet(shadow))
    }

    /// Whether no work can be using a shadow's addresses any more.
    pub(super) fn is_quiet(&self, shadow: Shadow) -> bool {
        self.is_quiet_since(shadow.clock)
    }

    /// Whether addresses that were freed at `clock` may be unmapped: no work can be using them,
    /// and no capture is under way.
    pub(super) fn is_quiet_since(&self, clock: u64) -> bool {
        clock <= self.marks.quiet && !self.capturing()
    }

    fn destroy(&mut self, handle: Handle, size: u64) -> u64 {
        self.stats.work.destroys += 1;
        match self.driver.destroy(handle) {
            Ok(()) => {
                self.space.physical -= size;
                size
            }
            Err(_) => {
                self.space.spare.push((handle, size));
                0
            }
        }
    }

    fn give_back_plain(&mut self) -> u64 {
        let mut bytes = 0;
        for index in 0..self.space.segments.len() as u16 {
            let segment = &self.space.segments[index as usize];
            let (first, base, size, arena) = (segment.first, segment.base, segment.size, segment.arena);
            let lane = lane_of(arena);
            if !segment.in_use || !segment.plain || !self.may_take_from(lane) || self.lanes[lane].loud {
                continue;
            }
            let block = &self.blocks[first];
            let idle = block.state == State::Free && block.size == size;
            if !idle || block.word > self.marks.quiet {
                continue;
            }
            self.stats.work.destroys += 1;
            if self.driver.deallocate(base, size).is_err() {
                continue;
            }
            self.unbin(arena, first);
            self.blocks.vacate(first);
            self.lanes[lane].arenas[kind_of(arena)].segments.retain(|&other| other != index);
            self.space.forget_plain(index);
            AddressSpace::remove(base);
            self.space.physical -= size;
            self.uncount_mapped(arena, index, size);
            bytes += size;
        }
        bytes
    }

    /// Lets a lane of a released pool go if nothing of it is left; its addresses may be used again.
    pub(super) fn close_lane(&mut self, lane: usize) -> bool {
        // Whatever is handed out, or waits, lies in mapped memory.
        let left = |arena: &Arena| arena.segments.iter().any(|&s| self.space.segments[s as usize].mapped > 0);
        if self.lanes[lane].arenas.iter().any(left) {
            return false;
        }
        let segments = self.lanes[lane].arenas.iter().flat_map(|arena| &arena.segments);
        let shadowed = segments.into_iter().any(|&segment| self.space.has_shadows(segment));
        // Later, when what was mapped here can be known to be quiet.
        if !self.hush() && shadowed {
            return false;
        }
        let closed = std::mem::replace(&mut self.lanes[lane], Lane::new(super::Stream(0), 0));
        self.lanes[lane].in_use = false;
        self.lane_of.remove(&(closed.pool, closed.stream));
        for segment in closed.arenas.iter().flat_map(|arena| &arena.segments) {
            let entry = &mut self.space.segments[*segment as usize];
            entry.in_use = false;
            let (region, base) = (entry.region, entry.base);
            self.blocks.vacate(entry.first);
            self.space.clear(region, base);
            // The clock means nothing to the lane that gets the addresses next.
            self.space.reset_clocks(*segment);
        }
        true
    }

    /// Gives everything back to the driver, whatever is still handed out: the heap's end.
    pub(super) fn dismantle(&mut self) {
        // Failures leave us nothing to do: the process, or the driver, is ending.
        let _waited = self.driver.synchronize_device();
        self.drop_events();
        for (_, piece, shadows) in self.space.pieces() {
            let shadows = shadows.iter().filter(|shadow| self.driver.unmap(shadow.at, piece.size).is_err());
            if shadows.count() == 0 && self.driver.unmap(piece.at, piece.size).is_ok() {
                let _destroyed = self.driver.destroy(piece.handle);
            }
        }
        for (handle, _) in std::mem::take(&mut self.space.spare) {
            let _destroyed = self.driver.destroy(handle);
        }
        for region in self.space.regions.iter().filter(|region| region.size > 0) {
            AddressSpace::remove(region.base);
            let _given_back = if region.plain {
                self.driver.deallocate(region.base, region.size)
            } else {
                self.driver.unreserve(region.base, region.size)
            };
        }
    }
}
