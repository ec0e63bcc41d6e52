// Throwing torch's own exceptions, and what else the process's libstdc++ must do for us, without torch's headers and
// without libstdc++ at link time.
//
// Must not know: memory. Every function used is found in the libstdc++ and libc10 that torch itself uses,
// by name, when the first exception is due. Invariant: no frame of Rust lies between the throw and torch.
#include "torch_shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

namespace strandline {
namespace {

// c10::SourceLocation.
struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

// More than any c10::Error needs (2.11: 176 bytes); the object's real size is not known here.
constexpr size_t EXCEPTION_ROOM = 1024;

using ErrorConstructor = void (*)(void *self, SourceLocation where, String *message);
using StringConstructor = void (*)(String *self, const char *text, size_t length, const void *allocator);
using NothrowNew = void *(*)(size_t size, const void *nothrow);
using StringDestructor = void (*)(String *self);

// One kind of exception: what type a handler sees, and the virtual functions of its objects.
struct Kind {
    void *type;
    void **functions;
};

struct Runtime {
    void *(*allocate_exception)(size_t);
    void (*throw_exception)(void *, void *, void (*)(void *));
    void (*throw_runtime_error)(const char *);
    StringConstructor make_string;
    StringDestructor drop_string;
    ErrorConstructor make_error;
    NothrowNew nothrow_new;
    void **type_info_functions;
    Kind error, out_of_memory;
};

Runtime runtime;
pthread_once_t once = PTHREAD_ONCE_INIT;

void *loaded(const char *name) {
    return dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
}

template <typename T>
void find(T &place, void *library, const char *name) {
    void *found = library ? dlsym(library, name) : nullptr;
    memcpy(&place, &found, sizeof found);
}

Kind find_kind(void *library, const char *type, const char *functions) {
    Kind kind = {};
    find(kind.type, library, type);
    char *table = nullptr;
    find(table, library, functions);
    // Two words come before the functions: the offset to the top and the type.
    if (table) kind.functions = reinterpret_cast<void **>(table + 2 * sizeof(void *));
    return kind;
}

void resolve() {
    void *c10 = loaded("libc10.so");
    void *c10_cuda = loaded("libc10_cuda.so");
    // A search in libc10.so goes on in its dependencies: this is the libstdc++ that torch uses.
    void *cxx = c10 ? c10 : loaded("libstdc++.so.6");
    find(runtime.allocate_exception, cxx, "__cxa_allocate_exception");
    find(runtime.throw_exception, cxx, "__cxa_throw");
    // A program may have an operator new of its own, which comes first.
    void *programs = dlsym(RTLD_DEFAULT, "_ZnwmRKSt9nothrow_t");
    memcpy(&runtime.nothrow_new, &programs, sizeof programs);
    if (!runtime.nothrow_new) find(runtime.nothrow_new, cxx, "_ZnwmRKSt9nothrow_t");
    runtime.type_info_functions =
        find_kind(cxx, "_ZTIN10__cxxabiv117__class_type_infoE", "_ZTVN10__cxxabiv117__class_type_infoE").functions;
    find(runtime.throw_runtime_error, cxx, "_ZSt21__throw_runtime_errorPKc");
    find(runtime.make_error, c10,
         "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
    if (runtime.make_error || !c10) {
        find(runtime.make_string, cxx, "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_");
        find(runtime.drop_string, cxx, "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev");
    } else {
        // Wheels before torch 2.7 were built for the older std::string.
        find(runtime.make_error, c10, "_ZN3c105ErrorC2ENS_14SourceLocationESs");
        find(runtime.make_string, cxx, "_ZNSsC1EPKcmRKSaIcE");
        find(runtime.drop_string, cxx, "_ZNSsD1Ev");
    }
    runtime.error = find_kind(c10, "_ZTIN3c105ErrorE", "_ZTVN3c105ErrorE");
    runtime.out_of_memory =
        find_kind(c10_cuda, "_ZTIN3c1016OutOfMemoryErrorE", "_ZTVN3c1016OutOfMemoryErrorE");
    // The class is all inline: any library of torch may be the one that holds it.
    const char *others[] = {"libtorch_cuda.so", "libtorch_cpu.so", "libtorch_python.so"};
    for (const char *name : others) {
        if (runtime.out_of_memory.type && runtime.out_of_memory.functions) break;
        runtime.out_of_memory =
            find_kind(loaded(name), "_ZTIN3c1016OutOfMemoryErrorE", "_ZTVN3c1016OutOfMemoryErrorE");
    }
}

void throw_text(int status, const char *text) {
    pthread_once(&once, resolve);
    const Kind &wanted = status == OUT_OF_MEMORY ? runtime.out_of_memory : runtime.error;
    const Kind &kind = wanted.type && wanted.functions ? wanted : runtime.error;
    String message;
    if (kind.type && kind.functions && runtime.make_error && runtime.allocate_exception &&
        runtime.throw_exception && runtime.drop_string && make_string(&message, text, strlen(text))) {
        void *object = runtime.allocate_exception(EXCEPTION_ROOM);
        memset(object, 0, EXCEPTION_ROOM);
        runtime.make_error(object, SourceLocation{"malloc", "strandline", 0}, &message);
        runtime.drop_string(&message);
        *static_cast<void **>(object) = kind.functions;
        // std::exception declares its destructor first: the first virtual function destroys the object.
        void (*destroy)(void *);
        memcpy(&destroy, kind.functions, sizeof destroy);
        runtime.throw_exception(object, kind.type, destroy);
    }
    // A torch whose classes are named otherwise: a RuntimeError with the same text.
    if (runtime.throw_runtime_error) runtime.throw_runtime_error(text);
}

}  // namespace

bool make_string(String *place, const char *text, size_t length) {
    pthread_once(&once, resolve);
    if (!runtime.make_string) return false;
    char allocator = 0;  // std::allocator is an empty class
    runtime.make_string(place, text, length, &allocator);
    return true;
}

void *operator_new(size_t size) {
    pthread_once(&once, resolve);
    char nothrow = 0;  // std::nothrow_t is an empty class
    return runtime.nothrow_new ? runtime.nothrow_new(size, &nothrow) : nullptr;
}

void **type_info_functions() {
    pthread_once(&once, resolve);
    return runtime.type_info_functions;
}

void raise(int status, char *message) {
    // The text must outlive this frame's end by a throw, and be freed: it moves to the stack.
    char text[16384] = "strandline: the allocation failed";
    if (message) {
        size_t length = strlen(message);
        if (length >= sizeof text) {
            length = sizeof text - 1;
            // Not inside a character: what continues one in UTF-8 is 10xxxxxx.
            while (length && (static_cast<unsigned char>(message[length]) & 0xC0) == 0x80) --length;
        }
        memcpy(text, message, length);
        text[length] = 0;
        free(message);
    }
    throw_text(status, text);
}

void raise_text(const char *message) {
    throw_text(FAILED, message);
}

}  // namespace strandline
