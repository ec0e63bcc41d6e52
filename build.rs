//! Compiles what must be C++ (`cuda/`) and, on request, makes the bindings of the C header anew.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
