//! Names for native addresses, when a report is written.
//!
//! Must not be called while a stack is captured: it opens files, allocates and takes the loader's lock.
//! Invariant: an address without a symbol is still something a person can look up (file and offset).

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use object::{Object, ObjectSymbol, SymbolKind};
use parking_lot::Mutex;

/// What is known of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// The shared object, or the program.
    pub file: Arc<str>,
    pub function: Arc<str>,
    /// The address as the file's own tables name it.
    pub at: u64,
}

static KNOWN: Mutex<Option<HashMap<u64, Symbol>>> = Mutex::new(None);

/// Whether nobody holds what is known for longer than `patience`.
pub fn answers(patience: std::time::Duration) -> bool {
    KNOWN.try_lock_for(patience).is_some()
}

/// File and function of a return address.
pub fn symbol(address: u64) -> Symbol {
    if let Some(symbol) = KNOWN.lock().get_or_insert_default().get(&address) {
        return symbol.clone();
    }
    let symbol = look_up(address);
    KNOWN.lock().get_or_insert_default().insert(address, symbol.clone());
    symbol
}

fn look_up(address: u64) -> Symbol {
    // A return address may lie behind the last instruction of a function that never returns.
    let inside = address.saturating_sub(1);
    // SAFETY: an all-zero Dl_info is valid (null pointers); dladdr fills it in.
    let info = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(inside as *const libc::c_void, &raw mut info) != 0).then_some(info)
    };
    let Some(info) = info.filter(|info| !info.dli_fname.is_null()) else {
        return Symbol { file: "".into(), function: format!("{address:#x}").into(), at: inside };
    };
    // SAFETY: dladdr returns strings of the loaded object, which stay while it is loaded.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    let exported = (!info.dli_sname.is_null()).then(|| {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(info.dli_sname) }.to_string_lossy().into_owned()
    });
    let file = Path::new(OsStr::from_bytes(path.to_bytes()));
    let offset = inside.wrapping_sub(info.dli_fbase as u64);
    // The program's own path may be relative or gone; the kernel knows it.
    let map = Mapped::open(file).or_else(|| Mapped::open(Path::new("/proc/self/exe")));
    let elf = map.as_ref().and_then(|map| object::File::parse(map.bytes()).ok());
    // A program that is not position-independent names its addresses as they are.
    let fixed = elf.as_ref().is_some_and(|elf| elf.kind() == object::ObjectKind::Executable);
    let at = if fixed { inside } else { offset };
    let name = exported.or_else(|| local_symbol(elf.as_ref()?, at));
    let function = match name {
        Some(name) => demangle(&name),
        None => {
            let base = file.file_name().unwrap_or_default().to_string_lossy();
            format!("{base}+{offset:#x}")
        }
    };
    Symbol { file: path.to_string_lossy().into(), function: function.into(), at }
}

/// A symbol that is not exported, out of the file's own table (absent from stripped files).
fn local_symbol(elf: &object::File<'_>, at: u64) -> Option<String> {
    elf.symbols()
        .filter(|symbol| symbol.kind() == SymbolKind::Text)
        .find(|symbol| (symbol.address()..symbol.address().saturating_add(symbol.size())).contains(&at))
        .and_then(|symbol| symbol.name().ok().map(str::to_owned))
}

/// A file mapped for reading: some are gigabytes long.
pub(super) struct Mapped {
    start: *mut libc::c_void,
    length: usize,
}

impl Mapped {
    pub(super) fn open(path: &Path) -> Option<Mapped> {
        Mapped::new(&File::open(path).ok()?)
    }

    /// The bytes for the rest of the process's life.
    pub(super) fn forever(self) -> &'static [u8] {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: mapped by `new` for this length, and never unmapped now.
        unsafe { std::slice::from_raw_parts(this.start.cast(), this.length) }
    }

    fn new(file: &File) -> Option<Mapped> {
        let length = usize::try_from(file.metadata().ok()?.len()).ok().filter(|length| *length != 0)?;
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
        };
        (start != libc::MAP_FAILED).then_some(Mapped { start, length })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped by `new` for this length until the drop.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.length) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, to which no slice is left (they borrow `self`).
        unsafe { libc::munmap(self.start, self.length) };
    }
}

/// The name without its parameters, which make C++ frames unreadable, and without long template arguments.
pub(super) fn demangle(name: &str) -> String {
    const LONG: usize = 120;
    let whole = demangle_whole(name);
    if whole.len() <= LONG {
        return whole;
    }
    let mut depth = 0usize;
    let mut short = String::new();
    for letter in whole.chars() {
        match letter {
            '<' => {
                if depth == 0 {
                    short.push_str("<…>");
                }
                depth += 1;
            }
            '>' => depth = depth.saturating_sub(1),
            _ if depth == 0 => short.push(letter),
            _ => {}
        }
    }
    // An operator's angle brackets, and then there is no telling where arguments end.
    if depth == 0 { short } else { whole }
}

fn demangle_whole(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
    cpp_demangle::Symbol::new(name)
        .ok()
        .and_then(|symbol| symbol.demangle(&options).ok())
        .unwrap_or_else(|| name.to_owned())
}

/// The autograd node whose `apply` this is: `AddmmBackward0` of
/// `torch::autograd::generated::AddmmBackward0::apply`.
pub fn autograd_node(function: &str) -> Option<&str> {
    let rest = function.strip_prefix("torch::autograd::")?;
    let rest = rest.strip_prefix("generated::").unwrap_or(rest);
    let end = rest.find("::apply")?;
    let (node, after) = (&rest[..end], &rest[end + "::apply".len()..]);
    // `apply_with_saved` and the like are no step of a backward pass.
    let whole = after.is_empty() || after.starts_with(['(', '<']);
    (whole && !node.is_empty() && node != "Node").then_some(node)
}

/// The operator of torch that this function dispatches to: `cat` of `at::_ops::cat::redispatch`. None for those that
/// make room for another's result.
pub fn operator(function: &str) -> Option<&str> {
    let (name, after) = function.strip_prefix("at::_ops::")?.split_once("::")?;
    let dispatches = after.starts_with("call") || after.starts_with("redispatch");
    (dispatches && !name.starts_with("empty") && !name.starts_with("new_empty")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_readable() {
        assert_eq!(
            demangle("_ZN5torch8autograd9generated14AddmmBackward05applyEOSt6vectorIN2at6TensorESaIS4_EE"),
            "torch::autograd::generated::AddmmBackward0::apply"
        );
        assert_eq!(demangle("_ZN3foo3bar17h05af221e174051e9E"), "foo::bar");
        assert_eq!(demangle("cudaMalloc"), "cudaMalloc");
        let long = format!("a::b<{}>::c", "x::y<z>, ".repeat(20));
        assert_eq!(demangle(&long), "a::b<…>::c");
        assert_eq!(demangle("_Znonsense"), "_Znonsense");
    }

    #[test]
    fn nodes_of_autograd() {
        for (function, node) in [
            ("torch::autograd::generated::AddmmBackward0::apply", Some("AddmmBackward0")),
            (
                "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)",
                Some("MulBackward0"),
            ),
            ("torch::autograd::AccumulateGrad::apply", Some("AccumulateGrad")),
            ("torch::autograd::CppNode<Mine>::apply", Some("CppNode<Mine>")),
            ("torch::autograd::generated::MulBackward0::apply_with_saved", None),
            ("torch::autograd::Node::operator()", None),
            ("at::native::apply", None),
        ] {
            assert_eq!(autograd_node(function), node, "{function}");
        }
    }

    #[test]
    fn an_address_gets_its_symbol_or_its_offset() {
        let malloc = symbol(libc::malloc as *const () as u64 + 1);
        assert!(malloc.function.contains("malloc"), "{malloc:?}");
        assert!(malloc.file.contains("libc"), "{malloc:?}");
        assert_eq!(&*symbol(0x10).function, "0x10");
        let own = symbol(nodes_of_autograd as *const () as u64 + 1);
        assert!(own.function.contains("nodes_of_autograd"), "{own:?}");
    }

    #[test]
    fn operators_are_known_and_not_those_that_make_room() {
        for (function, name) in [
            ("at::_ops::cat::redispatch", Some("cat")),
            ("at::_ops::add_Tensor::call", Some("add_Tensor")),
            ("at::_ops::empty_memory_format::call", None),
            ("at::_ops::empty_strided::redispatch", None),
            ("at::_ops::cat::name", None),
            ("at::native::cat", None),
        ] {
            assert_eq!(operator(function), name, "{function}");
        }
    }
}
