// Compiles the roots with NVRTC, as the crate does; the library is opened when it is needed.
#pragma once

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "variant.h"

namespace dev {

struct Unit {
    std::string root, file;
    Variant::Macros macros;
};

// The headers, by the names that includes use.
inline std::vector<std::pair<std::string, std::string>> headers(const std::string& kernels) {
    std::vector<std::pair<std::string, std::string>> all;
    for (const char* name : {"args.h", "traits.cuh", "ptx.cuh", "pages.cuh", "wgmma.cuh", "gemm.cuh", "softmax.cuh", "pipeline.cuh", "epilogue.cuh",
                             "merge.cuh", "direct.cuh", "cluster.cuh", "task.cuh", "helpers.cuh", "narrow_query.cuh", "narrow.cuh", "tile.cuh", "plain.cuh",
                             "reduce.cuh", "../common/args.h", "../common/records.h"}) {
        std::stringstream text;
        text << std::ifstream(kernels + "/nvidia/" + name).rdbuf();
        all.push_back({name, text.str()});
    }
    all.push_back({"records.h", all.back().second});
    return all;
}

inline bool compile(const Unit& unit, const std::string& kernels, const std::string& arch) {
    void* lib = dlopen(getenv("NVRTC") ? getenv("NVRTC") : "libnvrtc.so.13", RTLD_NOW);
    if (!lib) return fprintf(stderr, "%s\n", dlerror()), false;
    auto create = (int (*)(void**, const char*, const char*, int, const char* const*, const char* const*))dlsym(lib, "nvrtcCreateProgram");
    auto build = (int (*)(void*, int, const char* const*))dlsym(lib, "nvrtcCompileProgram");
    auto size = (int (*)(void*, size_t*))dlsym(lib, "nvrtcGetCUBINSize");
    auto get = (int (*)(void*, char*))dlsym(lib, "nvrtcGetCUBIN");
    auto log_size = (int (*)(void*, size_t*))dlsym(lib, "nvrtcGetProgramLogSize");
    auto get_log = (int (*)(void*, char*))dlsym(lib, "nvrtcGetProgramLog");
    std::stringstream source;
    source << std::ifstream(kernels + "/nvidia/" + unit.root + ".cu").rdbuf();
    const auto all = headers(kernels);
    std::vector<const char*> texts, names;
    for (const auto& [name, text] : all) names.push_back(name.c_str()), texts.push_back(text.c_str());
    std::vector<std::string> options = {"--gpu-architecture=" + arch, "--std=c++17", "-lineinfo", "-DPA_KERNEL=kernel"};
    std::stringstream extra(getenv("DEFINES") ? getenv("DEFINES") : "");
    for (std::string option; extra >> option;) options.push_back(option);
    for (const auto& [key, value] : unit.macros) options.push_back("-DPA_" + key + "=" + std::to_string(value));
    std::vector<const char*> flags;
    for (const auto& option : options) flags.push_back(option.c_str());
    void* program;
    if (create(&program, source.str().c_str(), (unit.root + ".cu").c_str(), int(all.size()), texts.data(), names.data())) return false;
    const bool failed = build(program, int(flags.size()), flags.data());
    size_t n = 0;
    log_size(program, &n);
    std::string log(n, 0);
    get_log(program, log.data());
    if (n > 1) fprintf(stderr, "%s\n%s\n", unit.file.c_str(), log.c_str());
    if (failed) return false;
    size(program, &n);
    std::string cubin(n, 0);
    get(program, cubin.data());
    std::ofstream(unit.file, std::ios::binary) << cubin;
    return true;
}

// Compiles what is missing, JOBS at a time, a process each.
inline int compile_all(const std::map<std::string, Unit>& units, const std::string& kernels, const std::string& arch) {
    const int jobs = getenv("JOBS") ? atoi(getenv("JOBS")) : 2;
    int running = 0, failed = 0, made = 0;
    auto reap = [&] {
        int status;
        wait(&status);
        running--, failed += status != 0;
    };
    for (const auto& [file, unit] : units) {
        if (access(file.c_str(), F_OK) == 0) continue;
        if (running == jobs) reap();
        if (fork() == 0) _exit(!compile(unit, kernels, arch));
        running++, made++;
    }
    while (running) reap();
    printf("%zu kernels, %d compiled, %d failed\n", units.size(), made, failed);
    return failed != 0;
}

}  // namespace dev
