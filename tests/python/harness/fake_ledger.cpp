// A stand-in for libstrandline in tests of the Python side: watches CPU tensors, offers every site whose blocks
// survive as a candidate, and writes the answers to FAKE_LEDGER_OUT, one JSON object a line.
// It must not be clever: no trends, no findings. Built and preloaded by workloads.py.
#include <Python.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
struct Block { size_t size; long step; int site; long serial; };
std::mutex lock;
std::unordered_map<void*, Block> live;
std::map<std::string, int> sites;
std::vector<std::string> stacks;
std::set<int> asked;
std::map<long, int> offered;
long step_now = 0, serial = 0, epochs = 0;
int mode = 0, phase_now = 0;
bool busy = false;

std::string escaped(const char* text) {
  std::string out;
  for (; *text; ++text) { if (*text == '"' || *text == '\\') out += '\\'; out += *text; }
  return out;
}

std::string stack() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return "[]";
  PyGILState_STATE held = PyGILState_Ensure();
  std::string out = "[";
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int depth = 0; frame && depth < 30; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    char text[1024];
    snprintf(text, sizeof text, "%s{\"file\":\"%s\",\"line\":%d,\"function\":\"%s\"}", depth ? "," : "",
             escaped(PyUnicode_AsUTF8(code->co_filename)).c_str(), PyFrame_GetLineNumber(frame),
             escaped(PyUnicode_AsUTF8(code->co_name)).c_str());
    out += text;
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(held);
  return out + "]";
}

int every() { const char* text = getenv("FAKE_LEDGER_EVERY"); return text ? atoi(text) : 30; }

std::map<int, std::vector<std::pair<long, std::pair<void*, Block>>>> survivors() {
  std::map<int, std::vector<std::pair<long, std::pair<void*, Block>>>> found;
  for (auto& entry : live)
    if (entry.second.step < step_now - 1 && entry.second.step > 0 && !asked.count(entry.second.site))
      found[entry.second.site].push_back({entry.second.serial, {entry.first, entry.second}});
  for (auto it = found.begin(); it != found.end();) {
    std::set<long> births;
    for (auto& block : it->second) births.insert(block.second.second.step);
    const char* least = getenv("FAKE_LEDGER_LEAST");
    if ((int)births.size() < (least ? atoi(least) : 3)) it = found.erase(it);
    else { std::sort(it->second.begin(), it->second.end(), [](auto& a, auto& b) { return a.first < b.first; }); ++it; }
  }
  return found;
}
}  // namespace

extern "C" {
void* _ZN3c109alloc_cpuEm(size_t size) {
  // torch's own is out of reach of RTLD_NEXT: libc10 is loaded in a local scope
  void* block = nullptr;
  if (!size || posix_memalign(&block, 64, size)) return nullptr;
  if (mode && size) {
    std::string where = stack();
    std::lock_guard<std::mutex> guard(lock);
    auto known = sites.emplace(where, (int)sites.size());
    if (known.second) stacks.push_back(where);
    live[block] = {size, step_now, known.first->second, ++serial};
  }
  return block;
}
void _ZN3c108free_cpuEPv(void* block) {
  if (mode) { std::lock_guard<std::mutex> guard(lock); live.erase(block); }
  free(block);
}
unsigned strandline_abi_version() { return 1; }
const char* strandline_version() { return "fake"; }
int strandline_start(int wanted, const char*) { mode = wanted; return 0; }
int strandline_mode() { return mode; }
int strandline_step() {
  if (!mode) return -2;
  ++step_now;
  if (step_now % every()) return 0;
  std::lock_guard<std::mutex> guard(lock);
  return (int)survivors().size();
}
int strandline_epoch() { ++epochs; return 0; }
int strandline_phase_of(const char *) { return 5; }
int strandline_phase(int phase) { int before = phase_now; phase_now = phase; return before; }
size_t strandline_candidates(char* buffer, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  std::string out = "[";
  for (auto& site : survivors()) {
    auto& blocks = site.second;
    size_t bytes = 0;
    for (auto& block : blocks) bytes += block.second.second.size;
    out += out.size() > 1 ? ",{" : "{";
    out += "\"id\":" + std::to_string(site.first) + ",\"class\":\"per-iteration\",\"device\":-1,\"live_bytes\":" +
           std::to_string(bytes) + ",\"live_blocks\":" + std::to_string(blocks.size()) + ",\"stack\":" + stacks[site.first] +
           ",\"blocks\":[";
    size_t many = std::min<size_t>(16, blocks.size());
    for (size_t n = 0; n < many; ++n) {
      auto& block = blocks[many > 1 ? n * (blocks.size() - 1) / (many - 1) : 0].second;
      out += (n ? "," : "") + std::string("{\"address\":") + std::to_string((size_t)block.first) + ",\"size\":" +
             std::to_string(block.second.size) + ",\"step\":" + std::to_string(block.second.step) + "}";
    }
    out += "]}";
  }
  out += "]";
  if (size) { size_t n = std::min(out.size(), size - 1); memcpy(buffer, out.data(), n); buffer[n] = 0; }
  return out.size();
}
int strandline_explain(unsigned long id, const char* answer) {
  asked.insert((int)id);
  if (const char* path = getenv("FAKE_LEDGER_OUT")) {
    FILE* file = fopen(path, "a");
    fprintf(file, "{\"id\":%lu,\"step\":%ld,\"stack\":%s,\"answer\":%s}\n", id, step_now, stacks[id].c_str(), answer);
    fclose(file);
  }
  return 0;
}
int strandline_report(const char*) {
  if (const char* path = getenv("FAKE_LEDGER_OUT")) {
    FILE* file = fopen(path, "a");
    fprintf(file, "{\"steps\":%ld,\"epochs\":%ld}\n", step_now, epochs);
    fclose(file);
  }
  return 0;
}
size_t strandline_stats(int, char* buffer, size_t size) { if (size) buffer[0] = 0; return 0; }
}
