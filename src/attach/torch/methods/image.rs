//! Reading a loaded library: names of functions, sizes of symbols, the text that a function refers to.
//!
//! Must not know: torch's classes. Invariant: memory is read only inside the loaded segments of one
//! library, as the dynamic linker describes them.

use std::ffi::{CStr, c_int, c_void};

/// The bytes of a function in which the reference to its error text is looked for. The defaults of
/// torch's base class are 128 bytes long and refer to it in the first 48.
const WINDOW: usize = 112;
/// What torch's defaults say before the feature's name.
const SAYS: &[u8] = b" does not yet support ";
/// Longer than any feature's name.
const NAME: usize = 64;

unsafe extern "C" {
    fn dladdr1(at: *const c_void, info: *mut libc::Dl_info, extra: *mut *mut c_void, flags: c_int) -> c_int;
}

const RTLD_DL_SYMENT: c_int = 1;

/// The exported name of the function that starts exactly at `at`.
pub fn name_at(at: *const c_void) -> Option<String> {
    // SAFETY: all-zero is a valid value of this C struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr reads the linker's own tables; `info` is room for its answer.
    let found = unsafe { libc::dladdr(at, &mut info) };
    if found == 0 || info.dli_sname.is_null() || info.dli_saddr.cast_const() != at {
        return None;
    }
    // SAFETY: a name in the library's string table.
    unsafe { CStr::from_ptr(info.dli_sname) }.to_str().ok().map(str::to_owned)
}

/// The size of the symbol that starts at `at`, from the symbol table. Bytes.
pub fn symbol_size(at: *const c_void) -> Result<usize, String> {
    // SAFETY: all-zero is a valid value of this C struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let mut entry: *mut c_void = std::ptr::null_mut();
    // SAFETY: as in `name_at`; `entry` receives a pointer into the symbol table.
    let found = unsafe { dladdr1(at, &mut info, &mut entry, RTLD_DL_SYMENT) };
    if found == 0 || entry.is_null() || info.dli_saddr.cast_const() != at {
        return Err("the vtable has no symbol".into());
    }
    // SAFETY: the linker's answer to RTLD_DL_SYMENT.
    let size = unsafe { (*entry.cast::<libc::Elf64_Sym>()).st_size } as usize;
    if (16..65_536).contains(&size) { Ok(size) } else { Err(format!("a vtable of {size} bytes")) }
}

/// The loaded segments of one library.
pub struct Image {
    segments: Vec<std::ops::Range<usize>>,
}

impl Image {
    /// The library that `at` lies in.
    pub fn containing(at: *const c_void) -> Result<Image, String> {
        struct Search {
            at: usize,
            found: Option<Image>,
        }
        unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
            // SAFETY: `data` is the search below; the linker passes a valid info with its headers.
            let (search, info) = unsafe { (&mut *data.cast::<Search>(), &*info) };
            // SAFETY: as above.
            let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize) };
            let readable = |header: &&libc::Elf64_Phdr| {
                header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_R != 0
            };
            let segments: Vec<_> = headers
                .iter()
                .filter(readable)
                .map(|header| {
                    let start = info.dlpi_addr as usize + header.p_vaddr as usize;
                    start..start + header.p_memsz as usize
                })
                .collect();
            if segments.iter().any(|segment| segment.contains(&search.at)) {
                search.found = Some(Image { segments });
                return 1;
            }
            0
        }
        let mut search = Search { at: at as usize, found: None };
        // SAFETY: `visit` has the type that is expected and `search` lives through the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found.ok_or_else(|| "the vtable lies in no library".into())
    }

    /// `length` bytes at `at`, if they lie in one segment.
    fn bytes(&self, at: usize, length: usize) -> Option<&[u8]> {
        let end = at.checked_add(length)?;
        self.segments.iter().find(|segment| segment.contains(&at) && end <= segment.end)?;
        // SAFETY: inside a loaded, readable segment, which stays as long as the library (torch is never
        // unloaded).
        Some(unsafe { std::slice::from_raw_parts(at as *const u8, length) })
    }

    /// If the function at `at` refers to text like "… does not yet support X", X.
    pub fn unsupported_feature(&self, at: usize) -> Option<String> {
        let code = self.bytes(at, WINDOW)?;
        if cfg!(not(target_arch = "x86_64")) {
            return None;
        }
        (0..WINDOW - 7).find_map(|i| {
            // lea reg64, [rip + disp32]: REX.W (with R), 8D, mod 00 and rm 101.
            let is_lea = code[i] & 0xfb == 0x48 && code[i + 1] == 0x8d && code[i + 2] & 0xc7 == 0x05;
            if !is_lea {
                return None;
            }
            let distance = i32::from_le_bytes([code[i + 3], code[i + 4], code[i + 5], code[i + 6]]);
            self.feature((at + i + 7).wrapping_add_signed(distance as isize))
        })
    }

    fn feature(&self, at: usize) -> Option<String> {
        let text = self.bytes(at, SAYS.len() + NAME)?.strip_prefix(SAYS)?;
        let name: Vec<u8> = text.iter().copied().take_while(u8::is_ascii_alphanumeric).collect();
        (!name.is_empty()).then(|| String::from_utf8(name).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_outside_a_library_is_not_read() {
        let image =
            Image::containing(name_at as fn(*const c_void) -> Option<String> as *const c_void).unwrap();
        assert!(image.bytes(8, 4).is_none());
        assert!(image.bytes(usize::MAX - 2, 4).is_none());
        assert_eq!(image.unsupported_feature(0), None);
        assert!(Image::containing(std::ptr::without_provenance(8)).is_err());
    }

    #[test]
    fn a_function_of_libc_has_a_name() {
        assert!(name_at(libc::getpid as unsafe extern "C" fn() -> i32 as *const c_void).is_some());
    }
}
