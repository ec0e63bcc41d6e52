//! The rules of a device's memory: what is reserved, created and mapped, and what may be done next.
//!
//! It knows no real memory and no streams. A `may_…` function checks and changes nothing; its twin
//! without `may` writes the change down after the memory itself has been changed. Invariants: mappings
//! lie in reservations and do not overlap; `created` is the sum of all handles and plain segments.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use crate::driver::{Address, DriverError, Handle, Result};

/// CUDA's code for a call that makes no sense (`CUDA_ERROR_INVALID_VALUE`).
const INVALID: i32 = 1;

pub(super) struct Books {
    granularity: u64,
    /// Physical memory of the device; bytes.
    pub(super) memory: u64,
    /// Physical memory in use; bytes.
    pub(super) created: u64,
    /// Calls that made no sense.
    pub(super) violations: u64,
    reserved: BTreeMap<Address, u64>,
    mapped: BTreeMap<Address, (u64, Handle)>,
    plain: BTreeMap<Address, u64>,
    handles: HashMap<u64, Piece>,
    last_handle: u64,
}

/// One handle: its size, where it is mapped, and where its content lies while it is not.
struct Piece {
    size: u64,
    mapped: Vec<Address>,
    parked: Option<Address>,
}

/// Where the content of a handle is that is about to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// It was never mapped.
    None,
    /// Out of the way.
    Parked(Address),
    /// Mapped here, and will stay so.
    At(Address),
}

impl Books {
    pub(super) fn new(granularity: u64, memory: u64) -> Self {
        Books {
            granularity,
            memory,
            created: 0,
            violations: 0,
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            plain: BTreeMap::new(),
            handles: HashMap::new(),
            last_handle: 0,
        }
    }

    fn refuse<T>(&mut self, call: &'static str) -> Result<T> {
        self.violations += 1;
        Err(DriverError::Failed { call, code: INVALID })
    }

    /// A size must be a positive multiple of the granularity.
    pub(super) fn whole(&mut self, size: u64, call: &'static str) -> Result<()> {
        if size == 0 || !size.is_multiple_of(self.granularity) { self.refuse(call) } else { Ok(()) }
    }

    pub(super) fn reserve(&mut self, at: Address, size: u64) {
        self.reserved.insert(at, size);
    }

    pub(super) fn may_unreserve(&mut self, at: Address, size: u64) -> Result<()> {
        if self.reserved.get(&at) != Some(&size) || self.mapped.range(at..at + size).next().is_some() {
            return self.refuse("unreserve");
        }
        Ok(())
    }

    pub(super) fn unreserve(&mut self, at: Address) {
        self.reserved.remove(&at);
    }

    pub(super) fn may_create(&self, size: u64) -> Result<()> {
        match self.created.checked_add(size) {
            Some(sum) if sum <= self.memory => Ok(()),
            _ => Err(DriverError::OutOfMemory),
        }
    }

    pub(super) fn create(&mut self, size: u64) -> Result<Handle> {
        self.may_create(size)?;
        self.created += size;
        self.last_handle += 1;
        self.handles.insert(self.last_handle, Piece { size, mapped: Vec::new(), parked: None });
        Ok(Handle(self.last_handle))
    }

    /// Where the content that must be dropped lies, if there is any.
    pub(super) fn may_destroy(&mut self, handle: Handle) -> Result<Option<(Address, u64)>> {
        match self.handles.get(&handle.0) {
            Some(piece) if piece.mapped.is_empty() => Ok(piece.parked.map(|at| (at, piece.size))),
            _ => self.refuse("destroy"),
        }
    }

    pub(super) fn destroy(&mut self, handle: Handle) {
        if let Some(piece) = self.handles.remove(&handle.0) {
            self.created -= piece.size;
        }
    }

    /// Where the content of the handle is; with `aliases` it may be mapped elsewhere already.
    pub(super) fn may_map(
        &mut self,
        at: Address,
        size: u64,
        handle: Handle,
        aliases: bool,
    ) -> Result<Content> {
        let content = match self.handles.get(&handle.0).filter(|piece| piece.size == size) {
            Some(Piece { parked: Some(parked), .. }) => Content::Parked(*parked),
            Some(piece) => match piece.mapped.first() {
                None => Content::None,
                Some(&at) if aliases => Content::At(at),
                Some(_) => return self.refuse("map"),
            },
            None => return self.refuse("map"),
        };
        let inside = self.reserved.range(..=at).next_back().is_some_and(|(&base, &len)| {
            at + size <= base + len && (at - base).is_multiple_of(self.granularity)
        });
        let taken =
            self.mapped.range(..at + size).next_back().is_some_and(|(&other, &(len, _))| other + len > at);
        if !inside || taken { self.refuse("map") } else { Ok(content) }
    }

    pub(super) fn map(&mut self, at: Address, size: u64, handle: Handle) {
        if let Some(piece) = self.handles.get_mut(&handle.0) {
            piece.mapped.push(at);
            piece.parked = None;
        }
        self.mapped.insert(at, (size, handle));
    }

    /// Whether this is the handle's last mapping, so that its content must be put out of the way.
    pub(super) fn may_unmap(&mut self, at: Address, size: u64) -> Result<bool> {
        match self.mapped.get(&at) {
            Some(&(len, handle)) if len == size => {
                Ok(self.handles.get(&handle.0).is_none_or(|piece| piece.mapped.len() == 1))
            }
            _ => self.refuse("unmap"),
        }
    }

    pub(super) fn unmap(&mut self, at: Address, parked: Option<Address>) {
        if let Some((_, handle)) = self.mapped.remove(&at)
            && let Some(piece) = self.handles.get_mut(&handle.0)
        {
            piece.mapped.retain(|&other| other != at);
            piece.parked = parked;
        }
    }

    pub(super) fn allocate(&mut self, at: Address, size: u64) {
        self.created += size;
        self.plain.insert(at, size);
    }

    pub(super) fn may_deallocate(&mut self, at: Address, size: u64) -> Result<()> {
        if self.plain.get(&at) == Some(&size) { Ok(()) } else { self.refuse("deallocate") }
    }

    pub(super) fn deallocate(&mut self, at: Address) {
        if let Some(size) = self.plain.remove(&at) {
            self.created -= size;
        }
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        let mapped = self.handles.values().filter(|piece| !piece.mapped.is_empty());
        mapped.map(|piece| piece.size).sum::<u64>() + self.plain.values().sum::<u64>()
    }

    pub(super) fn reservations(&self) -> usize {
        self.reserved.len()
    }

    pub(super) fn is_mapped(&self, at: Address) -> bool {
        let mapped = self.mapped.range(..=at).next_back().is_some_and(|(&base, &(len, _))| at < base + len);
        let plain = self.plain.range(..=at).next_back().is_some_and(|(&base, &len)| at < base + len);
        mapped || plain
    }
}
