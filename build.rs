//! Compiles what must be C++ (`cuda/`) and, on request, makes the bindings of the C header anew.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    compile_cxx();
}

/// The C++ side. It is preloaded into processes that may have no libstdc++, so it must not need one: no
/// exceptions of its own (it throws through functions found at run time), no guards, no `operator new`.
/// Frames must still be unwindable: torch's exceptions pass through them.
fn compile_cxx() {
    cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .files(["cuda/torch_shim.cpp", "cuda/torch_throw.cpp", "cuda/torch_methods.cpp", "cuda/torch_autograd.cpp"])
        .flag("-fno-exceptions")
        .flag("-fasynchronous-unwind-tables")
        .flag("-fno-threadsafe-statics")
        .flag("-fvisibility=hidden")
        .extra_warnings(true)
        .warnings_into_errors(std::env::var_os("STRANDLINE_STRICT").is_some())
        .compile("strandline_cxx");
}
