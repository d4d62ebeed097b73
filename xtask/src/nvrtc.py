"""Compiles kernels.cu with NVRTC, once for each module that it names. Usage: nvrtc.py LIBNVRTC FOLDER_OF_SOURCES FOLDER_FOR_PTX"""

import ctypes
import re
import sys
from pathlib import Path

OPTIONS = [
    "--gpu-architecture=compute_70",
    "--std=c++17",
    # Each operation rounds once, and subnormals are kept, so that results have the same bits as on the CPU.
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
]


def main(library, sources, out):
    # Loaded here first: NVRTC opens its builtins library by name alone, without a folder.
    for builtins in Path(library).parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(library)
    text = (sources / "kernels.cu").read_text()
    headers = sorted(sources.glob("*.cuh"))
    out.mkdir(parents=True, exist_ok=True)
    for module in re.findall(r"defined\(MODULE_(\w+)\)", text):
        ptx = compile(nvrtc, text, headers, f"-DMODULE_{module}")
        (out / f"{module}.ptx").write_text(plain(ptx))


def compile(nvrtc, text, headers, define):
    def must(result, what):
        if result != 0:
            sys.exit(f"NVRTC: {what}, {define}: error {result}")

    def output(kind):
        size = ctypes.c_size_t()
        must(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), f"size of {kind}")
        memory = ctypes.create_string_buffer(size.value)
        must(getattr(nvrtc, f"nvrtcGet{kind}")(program, memory), kind)
        return memory.value.decode()

    def strings(values):
        return (ctypes.c_char_p * len(values))(*[value.encode() for value in values])

    program = ctypes.c_void_p()
    contents, names = strings([header.read_text() for header in headers]), strings([h.name for h in headers])
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernels.cu", len(headers), contents, names
    )
    must(created, "create")
    options = [*OPTIONS, define]
    compiled = nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
    log = output("ProgramLog").strip()
    if log:
        print(log, file=sys.stderr)
    must(compiled, "compile")
    if log:
        sys.exit(f"NVRTC: {define}: warnings are errors")
    ptx = output("PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def plain(ptx):
    """Removes comments, NVRTC's own constants, which no kernel uses, and needless white space: together 7 % of the text."""
    lines = (re.sub(r"\s+", " ", line.split("//")[0]).strip() for line in ptx.splitlines())
    lines = [line for line in lines if line]
    for name in re.findall(r"(?m)^\.global (?:\.\w+ (?:\d+ )?)+([\w$]+)", "\n".join(lines)):
        if sum(name in line for line in lines) > 1:
            sys.exit(f"NVRTC: a kernel uses the global variable {name}")
    return "\n".join(line for line in lines if not line.startswith(".global ")) + "\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
