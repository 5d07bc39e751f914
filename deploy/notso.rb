# Homebrew formula for macOS and Linux. `make release` inserts the file name and the SHA-256 of the source distribution.
# Before publication, insert the URL of its folder before the file name. Dependencies are verified with the hashes in
# supply/, which is part of the source distribution.
class Notso < Formula
  include Language::Python::Virtualenv

  desc "Chat page and API for SmolLM3-3B"
  url "@SOURCES@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    virtualenv_create(libexec, "python3.13")
    pip = ["python3.13", "-m", "pip", "--python", libexec/"bin/python", "install", "--no-deps"]
    system(*pip, "--require-hashes", "-r", "supply/build.txt", "-r", "supply/run.txt")
    system(*pip, "--no-build-isolation", ".")
    bin.install_symlink libexec/"bin/notso"
  end

  service do
    run [opt_bin/"notso", "serve", "--no-browser", "--plain"]
    keep_alive crashed: true
  end

  test do
    assert_match "75", shell_output("#{bin}/notso run --temperature 0 'What is 27 + 48?'")
  end
end
