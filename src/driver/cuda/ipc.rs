//! Sharing a block's memory with another process.
//!
//! Must not know: torch's handle strings, reference counts, who frees when. Memory made by `cuMemCreate`
//! is shared piece by piece: each handle under the block becomes a file descriptor, and the other process
//! maps the same pieces, in the same order, at an address of its own. Invariant: a descriptor lives as
//! long as the mapping that it stands for.

use super::context::check;
use super::{CudaDriver, Mapping};
use crate::driver::{Address, Driver, DriverError, Handle, Result};
use std::sync::OnceLock;

/// Told of a descriptor before it is closed, by whoever gave it to others.
static WITHDRAW: OnceLock<fn(i32)> = OnceLock::new();

/// Names the function that is told of every exported descriptor before it is closed. The first one stays.
pub fn on_close(withdraw: fn(i32)) {
    let _ = WITHDRAW.set(withdraw);
}

pub(super) fn withdraw(file: i32) {
    if let Some(withdraw) = WITHDRAW.get() {
        withdraw(file);
    }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// A block's pieces, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Where the block begins in the first piece. Bytes.
    pub offset: u64,
    /// Each piece's file descriptor (of this process; it stays open) and size, by address.
    pub pieces: Vec<(i32, u64)>,
}

/// Another process's pieces, mapped here. Give back with [`CudaDriver::forget`].
#[derive(Debug, PartialEq, Eq)]
pub struct Imported {
    pub at: Address,
    pub size: u64,
    pieces: Vec<(Address, u64, Handle)>,
}

impl CudaDriver {
    /// Makes the memory under `[at, at + size)` available to other processes.
    pub fn export(&self, at: Address, size: u64) -> Result<Exported> {
        let export = self.shared.symbols.export_handle;
        let export = export.ok_or(DriverError::Unsupported("cuMemExportToShareableHandle"))?;
        let _entered = self.shared.context.enter()?;
        let mut mappings = self.shared.mappings.lock();
        let first = mappings.at.range(..=at).next_back().map(|(start, _)| *start);
        let Some(first) = first else {
            return Err(DriverError::Unsupported("sharing memory that is not mapped"));
        };
        let mut exported = Exported { offset: at - first, pieces: Vec::new() };
        let mut next = first;
        for (start, mapping) in mappings.at.range_mut(first..at + size) {
            if *start != next {
                break;
            }
            exported.pieces.push((descriptor(export, mapping)?, mapping.size));
            next = start + mapping.size;
        }
        if next < at + size {
            return Err(DriverError::Unsupported("sharing memory that is not mapped"));
        }
        Ok(exported)
    }

    /// Maps another process's pieces (descriptors that are open in *this* process; they may be closed
    /// afterwards).
    pub fn import(&self, pieces: &[(i32, u64)]) -> Result<Imported> {
        let import = self.shared.symbols.import_handle;
        let import = import.ok_or(DriverError::Unsupported("cuMemImportFromShareableHandle"))?;
        let size: u64 = pieces.iter().map(|(_, size)| size).sum();
        let at = self.reserve(size)?;
        let mut imported = Imported { at, size, pieces: Vec::new() };
        let mut next = at;
        for (file, size) in pieces {
            let mut handle = 0;
            // SAFETY: `handle` is a place for one handle; the descriptor is passed by value in the pointer.
            let result = unsafe { import(&mut handle, *file as usize as *mut _, POSIX_FD) };
            let mapped = check("cuMemImportFromShareableHandle", result).and_then(|()| {
                self.map(next, *size, Handle(handle)).inspect_err(|_| {
                    let _ = self.destroy(Handle(handle));
                })
            });
            if let Err(error) = mapped {
                let _ = self.forget(imported);
                return Err(error);
            }
            imported.pieces.push((next, *size, Handle(handle)));
            next += size;
        }
        Ok(imported)
    }

    /// Takes imported memory out of this process; its owner keeps it. No work may still use it.
    pub fn forget(&self, imported: Imported) -> Result<()> {
        let mut outcome = Ok(());
        for (at, size, handle) in imported.pieces {
            outcome = outcome.and(self.unmap(at, size)).and(self.destroy(handle));
        }
        outcome.and(self.unreserve(imported.at, imported.size))
    }
}

/// The mapping's handle as a file descriptor, made at the first call.
fn descriptor(
    export: unsafe extern "C" fn(*mut std::ffi::c_void, u64, u32, u64) -> i32,
    mapping: &mut Mapping,
) -> Result<i32> {
    if let Some(file) = mapping.exported {
        return Ok(file);
    }
    let mut file = -1i32;
    // SAFETY: for this handle type the driver stores one int.
    let result = unsafe { export((&raw mut file).cast(), mapping.handle, POSIX_FD, 0) };
    check("cuMemExportToShareableHandle", result)?;
    if file < 0 {
        return Err(DriverError::Unsupported("cuMemExportToShareableHandle"));
    }
    mapping.exported = Some(file);
    Ok(file)
}
