//! Real memory of this process for a soft device, and its stand-in without memory.
//!
//! Memory is private and anonymous, never shared: a forked worker sees copy-on-write copies, as it would
//! of malloc's memory. A handle's first mapping only changes the protection of the reserved range, so
//! neighbours merge into one area of the kernel's (it allows 65,530 of them); only content that moves
//! costs an area of its own. Content moves by `mremap` without being copied, with MREMAP_DONTUNMAP so that
//! no other thread's mmap can land in the range that was left.
//!
//! It must not know books or streams; the caller has checked every range.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Memory, Options};
use crate::driver::{Address, DriverError, Result};

/// Host memory.
pub struct Pages {
    alignment: u64,
    huge: bool,
}

/// Host memory that can be at several addresses at once.
pub struct SharedPages(Pages);

/// No memory: addresses that are nobody's, never used twice.
pub struct NoPages;

/// Physical memory of this machine, in bytes.
pub(super) fn physical_memory() -> u64 {
    // SAFETY: sysconf reads a number and touches no memory of ours.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    match (u64::try_from(pages), u64::try_from(size)) {
        (Ok(pages), Ok(size)) if pages > 0 => pages * size,
        _ => 16 << 30,
    }
}

fn failed(call: &'static str) -> DriverError {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOMEM) => DriverError::OutOfMemory,
        code => DriverError::Failed { call, code: code.unwrap_or(0) },
    }
}

const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Maps fresh anonymous memory; `at` 0 lets the kernel choose, else it replaces what is there.
fn anonymous(at: Address, size: u64, protection: i32) -> Result<Address> {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    // SAFETY: with `at` 0 the kernel chooses a free range; otherwise the caller owns the whole range
    // (a reservation of ours), so replacing its mapping takes memory from nobody else.
    let got = unsafe { libc::mmap(at as *mut _, size as usize, protection, PRIVATE | fixed, -1, 0) };
    if got == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(got as Address) }
}

fn unmap(at: Address, size: u64) -> Result<()> {
    if size == 0 {
        return Ok(());
    }
    // SAFETY: the caller owns the range and nothing of ours points into it any more.
    let code = unsafe { libc::munmap(at as *mut _, size as usize) };
    if code == 0 { Ok(()) } else { Err(failed("munmap")) }
}

fn protect(at: Address, size: u64, protection: i32) -> Result<()> {
    // SAFETY: the caller owns the range, which is mapped (a reservation).
    let code = unsafe { libc::mprotect(at as *mut _, size as usize, protection) };
    if code == 0 { Ok(()) } else { Err(failed("mprotect")) }
}

impl Pages {
    /// A range of the kernel's choice, aligned; what the alignment needs more is given back at once.
    fn aligned(&self, size: u64, protection: i32) -> Result<Address> {
        let whole = size.checked_add(self.alignment).ok_or(DriverError::OutOfMemory)?;
        let got = anonymous(0, whole, protection)?;
        let at = got.next_multiple_of(self.alignment);
        unmap(got, at - got)?;
        unmap(at + size, got + whole - (at + size))?;
        if self.huge {
            // SAFETY: the range was mapped just now. Advice changes no content; a refusal does not matter.
            unsafe { libc::madvise(at as *mut _, size as usize, libc::MADV_HUGEPAGE) };
        }
        Ok(at)
    }

    /// Moves the content of `from` to `to` (a reservation that it replaces); `from` becomes a reservation.
    fn relocate(&self, from: Address, to: Address, size: u64) -> Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        // SAFETY: both ranges are ours and do not overlap: `from` is mapped memory, `to` a reservation.
        let got = unsafe {
            libc::mremap(from as *mut _, size as usize, size as usize, flags, to as *mut libc::c_void)
        };
        if got == libc::MAP_FAILED {
            self.copy(from, to, size)?;
        }
        self.vacate(from, size)
    }

    /// The way without MREMAP_DONTUNMAP (older kernels, sandboxes): the content is copied.
    fn copy(&self, from: Address, to: Address, size: u64) -> Result<()> {
        protect(to, size, libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: both ranges are ours, mapped readable and writable, `size` bytes long and disjoint.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, size as usize) };
        Ok(())
    }

    /// Turns a range back into a reservation without content.
    fn vacate(&self, at: Address, size: u64) -> Result<()> {
        anonymous(at, size, libc::PROT_NONE)?;
        if self.huge {
            // SAFETY: the range was mapped just now. Equal advice lets it merge with its neighbours.
            unsafe { libc::madvise(at as *mut _, size as usize, libc::MADV_HUGEPAGE) };
        }
        Ok(())
    }
}

impl Memory for Pages {
    const ALIASES: bool = false;

    fn open(options: &Options) -> Self {
        Pages { alignment: options.granularity.max(2 << 20), huge: options.huge_pages }
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        self.aligned(size, libc::PROT_NONE)
    }

    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        unmap(at, size)
    }

    fn populate(&self, at: Address, size: u64) -> Result<()> {
        protect(at, size, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn alias(&self, _: Address, _: Address, _: u64) -> Result<()> {
        Err(DriverError::Unsupported("private memory at two addresses"))
    }

    fn leave(&self, at: Address, size: u64) -> Result<()> {
        self.vacate(at, size)
    }

    fn park(&self, at: Address, size: u64) -> Result<Address> {
        let parked = self.aligned(size, libc::PROT_NONE)?;
        match self.relocate(at, parked, size) {
            Ok(()) => Ok(parked),
            Err(error) => {
                unmap(parked, size)?;
                Err(error)
            }
        }
    }

    fn unpark(&self, parked: Address, at: Address, size: u64) -> Result<()> {
        self.relocate(parked, at, size)?;
        unmap(parked, size)
    }

    fn discard(&self, parked: Address, size: u64) -> Result<()> {
        unmap(parked, size)
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        self.aligned(size, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        unmap(at, size)
    }
}

impl Memory for SharedPages {
    const ALIASES: bool = true;

    fn open(options: &Options) -> Self {
        SharedPages(Pages::open(options))
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        self.0.reserve(size)
    }

    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        self.0.unreserve(at, size)
    }

    fn populate(&self, at: Address, size: u64) -> Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is a reservation of ours, as the caller has checked.
        let got = unsafe { libc::mmap(at as *mut _, size as usize, protection, flags, -1, 0) };
        if got == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(()) }
    }

    fn alias(&self, from: Address, at: Address, size: u64) -> Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both ranges are ours; an old size of 0 shows the same shared memory a second time.
        let got = unsafe { libc::mremap(from as *mut _, 0, size as usize, flags, at as *mut libc::c_void) };
        if got == libc::MAP_FAILED { Err(failed("mremap")) } else { Ok(()) }
    }

    fn leave(&self, at: Address, size: u64) -> Result<()> {
        self.0.leave(at, size)
    }

    fn park(&self, at: Address, size: u64) -> Result<Address> {
        self.0.park(at, size)
    }

    fn unpark(&self, parked: Address, at: Address, size: u64) -> Result<()> {
        self.0.unpark(parked, at, size)
    }

    fn discard(&self, parked: Address, size: u64) -> Result<()> {
        self.0.discard(parked, size)
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        self.0.allocate(size)
    }

    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        self.0.deallocate(at, size)
    }
}

/// Above every address that a process can have.
static NEXT: AtomicU64 = AtomicU64::new(1 << 60);

fn nowhere(size: u64) -> Result<Address> {
    let step = size.checked_next_multiple_of(2 << 20).filter(|&step| step < 1 << 52);
    let step = step.ok_or(DriverError::OutOfMemory)?;
    // A gap after each range: running over its end must not look like the next range.
    Ok(NEXT.fetch_add(step + (2 << 20), Ordering::Relaxed))
}

impl Memory for NoPages {
    const ALIASES: bool = true;

    fn open(_: &Options) -> Self {
        NoPages
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        nowhere(size)
    }

    fn unreserve(&self, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn populate(&self, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn alias(&self, _: Address, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn leave(&self, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn park(&self, _: Address, _: u64) -> Result<Address> {
        Ok(0)
    }

    fn unpark(&self, _: Address, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn discard(&self, _: Address, _: u64) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        nowhere(size)
    }

    fn deallocate(&self, _: Address, _: u64) -> Result<()> {
        Ok(())
    }
}
