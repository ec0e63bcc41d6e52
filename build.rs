//! Embeds the Python side, compiles what must be C++ (`cuda/`) and, on request (feature `bindings`), makes
//! the Rust declarations of the C header anew.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    embed_python(Path::new("python/strandline"));
    compile_cxx();
    #[cfg(feature = "bindings")]
    bindings();
}

/// Writes a table of (module name, source) for the importer in `attach::python_boot`.
fn embed_python(folder: &Path) {
    println!("cargo:rerun-if-changed={}", folder.display());
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .expect("python/strandline is part of the source")
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "py"))
        // What is started before the library is there, and so from an installed package only.
        .filter(|path| !path.ends_with("__main__.py") && !path.ends_with("pytest_plugin.py"))
        .collect();
    files.sort();
    let mut table = String::from("static PYTHON_SOURCES: &[(&str, &str)] = &[\n");
    for file in files {
        println!("cargo:rerun-if-changed={}", file.display());
        let stem = file.file_stem().and_then(|s| s.to_str()).expect("a module's name is ASCII");
        let name = if stem == "__init__" { "" } else { stem };
        writeln!(table, "    ({name:?}, include_str!({:?})),", root.join(&file))
            .expect("writing to a string");
    }
    table.push_str("];\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("python_sources.rs");
    fs::write(out, table).expect("OUT_DIR is writable");
}

#[cfg(feature = "bindings")]
fn bindings() {
    println!("cargo:rerun-if-changed=include/strandline.h");
    println!("cargo:rerun-if-changed=src/attach/bindings.rs");
    bindgen::Builder::default()
        .header("include/strandline.h")
        .allowlist_item("strandline_.*|STRANDLINE_.*")
        .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
        .layout_tests(false)
        .disable_header_comment()
        .raw_line("// Made from include/strandline.h by `make bindings`; do not edit.")
        .generate()
        .expect("include/strandline.h is not understood by bindgen")
        .write_to_file("src/attach/bindings.rs")
        .expect("src/attach is not writable");
}

/// The C++ side. It is preloaded into processes that may have no libstdc++, so it must not need one: no
/// exceptions of its own (it throws through functions found at run time), no guards, no `operator new`.
/// Frames must still be unwindable: torch's exceptions pass through them.
fn compile_cxx() {
    cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .files([
            "cuda/torch_shim.cpp",
            "cuda/torch_throw.cpp",
            "cuda/torch_methods.cpp",
            "cuda/torch_checkpoint.cpp",
            "cuda/torch_autograd.cpp",
        ])
        .flag("-fno-exceptions")
        .flag("-fasynchronous-unwind-tables")
        .flag("-fno-threadsafe-statics")
        .flag("-fvisibility=hidden")
        .extra_warnings(true)
        .warnings_into_errors(std::env::var_os("STRANDLINE_STRICT").is_some())
        .compile("strandline_cxx");
}
