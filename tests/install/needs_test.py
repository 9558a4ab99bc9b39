"""What is missing to build weft is said in one line that says what to do."""
import os
import shutil
import subprocess
import tempfile
import unittest

SOURCE = os.environ["WEFT_SOURCE_DIR"]


class Needs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-needs-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def configure(self, *options, **environment):
        """What CMake's first error says, or an empty text."""
        done = subprocess.run(
            [shutil.which("cmake"), "-G", "Ninja", "-S", SOURCE, "-B", self.path("build"),
             "-DWEFT_TESTS=OFF", *options],
            capture_output=True, text=True, timeout=120,
            env={key: value for key, value in {**os.environ, **environment}.items()
                 if key not in ("CC", "CXX")})
        errors = done.stderr.split("CMake Error at ")
        self.assertEqual(done.returncode != 0, len(errors) > 1, done.stderr)
        if len(errors) < 2:
            return ""
        said = errors[1].split("\n", 1)[1].split("Call Stack")[0]
        return " ".join(said.split())

    def python(self, script):
        """An interpreter whose torch says what `script` says."""
        path = self.path("python3")
        with open(path, "w") as file:
            file.write(f"#!/bin/sh\n{script}\n")
        os.chmod(path, 0o755)
        return f"-DWEFT_PYTHON={path}"

    def test_nothing(self):
        self.assertEqual(self.configure(), "")

    def test_a_compiler(self):
        os.mkdir(self.path("bin"))
        for name in "cmake", "ninja", "sh":
            os.symlink(shutil.which(name), os.path.join(self.folder, "bin", name))
        self.assertEqual(self.configure(PATH=self.path("bin")),
                         "weft: there is no C++ compiler: install g++ 12, clang 14 or a later one "
                         "(Debian: apt-get install g++)")

    def test_libraries(self):
        said = self.configure("-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON",
                              "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON")
        self.assertEqual(said, "weft: libraries are missing that it is built with: install them "
                         "(Debian: apt-get install nlohmann-json3-dev libcli11-dev)")

    def test_a_torch_that_is_too_old(self):
        said = self.configure(self.python("echo 2.3.1; echo /lib; echo 1; echo /inc; echo .so; echo /inc"))
        self.assertEqual(said, "weft: torch 2.3.1 is too old: weft.torch needs 2.4 or later: install "
                         "one, or build without weft.torch (-DWEFT_TORCH=OFF)")

    def test_a_torch_that_is_broken(self):
        said = self.configure(self.python("echo 'ImportError: libc10.so: no such file' >&2; exit 1"))
        self.assertRegex(said, r"^weft: the torch of \S+ cannot be imported \(ImportError: libc10.so: "
                         r"no such file\): repair it, or build without weft.torch \(-DWEFT_TORCH=OFF\)$")

    def test_a_torch(self):
        python = self.python("""echo "ModuleNotFoundError: No module named 'torch'" >&2; exit 1""")
        self.assertEqual(self.configure(python), "")
        self.assertRegex(self.configure(python, "-DWEFT_TORCH=ON"),
                         r"^weft: \S+ has no torch: install torch 2.4 or later there first$")

    def test_the_headers_of_python(self):
        said = self.configure(self.python("echo 2.9.0; echo /lib; echo 1; echo /nowhere; echo .so; echo /inc"))
        self.assertEqual(said, "weft: /nowhere/Python.h is missing: install the headers of Python "
                         "(Debian: apt-get install python3-dev)")


if __name__ == "__main__":
    unittest.main()
