// Command image builds what the Dockerfile adds to its base image, without Docker: it takes the files that
// .dockerignore leaves and carries out the Dockerfile's instructions on them, as Docker does, in place of
// the builder's image with the programs of this machine. What Debian's packages are is left to hack/image.sh.
//
//	image -packages            print the packages that the base image is given
//	image [flags] -o DIRECTORY    build; DIRECTORY/root has the files of the image, DIRECTORY/config.json its settings
//
// It needs root and go.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"
	"github.com/moby/go-archive"
	"github.com/moby/patternmatcher/ignorefile"
)

func main() {
	log.SetFlags(0)
	var b build
	flag.StringVar(&b.source, "source", "../..", "the directory of the Dockerfile")
	flag.StringVar(&b.out, "o", "", "directory to make, for the result")
	flag.StringVar(&b.status, "status", "/var/lib/dpkg/status", "dpkg's list of what is in the base image")
	flag.StringVar(&b.arch, "arch", runtime.GOARCH, "architecture of the image")
	flag.StringVar(&b.version, "version", "dev", "version of the driver")
	packages := flag.Bool("packages", false, "print the packages of the base image")
	flag.Parse()
	if err := b.main(*packages); err != nil {
		log.Fatal("image: ", err)
	}
}

func (b *build) main(packages bool) error {
	if err := b.parse(); err != nil {
		return err
	}
	if packages {
		names, err := b.packages()
		fmt.Println(strings.Join(names, " "))
		return err
	}
	return b.run()
}

// build is one run.
type build struct {
	source, out, status, arch, version string

	stages  []instructions.Stage
	done    []*stage
	script  strings.Builder
	copied  []string // of the last stage: what was added to its base
	scratch string
}

// stage of the Dockerfile, as far as it was carried out.
type stage struct {
	name    string
	root    string // in the script
	debian  bool   // made of the base image: nothing is run in it
	workdir string
	args    map[string]string
	config  config
}

// config is what the image says of how it is run.
type config struct {
	Env        []string
	Labels     map[string]string
	Entrypoint []string
}

func (b *build) parse() error {
	file, err := os.Open(filepath.Join(b.source, "Dockerfile"))
	if err != nil {
		return err
	}
	defer file.Close()
	parsed, err := parser.Parse(file)
	if err != nil {
		return err
	}
	b.stages, _, err = instructions.Parse(parsed.AST, nil)
	return err
}

var install = regexp.MustCompile(`apt-get install -y --no-install-recommends ([a-z0-9.+ -]+?) +(&&|\\|$)`)

// packages are those that the Dockerfile installs.
func (b *build) packages() ([]string, error) {
	for _, s := range b.stages {
		for _, command := range s.Commands {
			if run, ok := command.(*instructions.RunCommand); ok {
				if found := install.FindStringSubmatch(strings.Join(run.CmdLine, " ")); found != nil {
					return strings.Fields(found[1]), nil
				}
			}
		}
	}
	return nil, errors.New("the Dockerfile installs no packages")
}

// context copies what Docker would be sent: the source without what .dockerignore names.
func (b *build) context(to string) error {
	ignore, err := os.Open(filepath.Join(b.source, ".dockerignore"))
	if err != nil {
		return err
	}
	defer ignore.Close()
	patterns, err := ignorefile.ReadAll(ignore)
	if err != nil {
		return err
	}
	sent, err := archive.TarWithOptions(b.source, &archive.TarOptions{ExcludePatterns: patterns})
	if err != nil {
		return err
	}
	defer sent.Close()
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	return command(sent, "tar", "-x", "--no-same-owner", "-C", to)
}

func command(in io.Reader, argv ...string) error {
	c := exec.Command(argv[0], argv[1:]...)
	c.Stdin, c.Stderr = in, os.Stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", argv[0], err)
	}
	return nil
}

// run carries the Dockerfile out: one script, in mounts of its own, which go when it ends.
func (b *build) run() error {
	if b.out == "" {
		return errors.New("-o is missing")
	}
	var err error
	if b.out, err = filepath.Abs(b.out); err != nil {
		return err
	}
	if err := os.MkdirAll(b.out+"/root", 0o755); err != nil {
		return err
	}
	if b.scratch, err = os.MkdirTemp("", "image"); err != nil {
		return err
	}
	defer os.RemoveAll(b.scratch)
	if err := b.context(b.scratch + "/context"); err != nil {
		return err
	}
	if err := b.write(); err != nil {
		return err
	}
	c := exec.Command("sh", "-euc", b.script.String())
	c.Stdout, c.Stderr = os.Stderr, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := c.Run(); err != nil {
		return fmt.Errorf("carry out the Dockerfile (root is needed): %w", err)
	}
	text, err := json.MarshalIndent(b.done[len(b.done)-1].config, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(b.out+"/config.json", text, 0o644)
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

func (b *build) say(format string, args ...any) { fmt.Fprintf(&b.script, format+"\n", args...) }

// write writes the script.
func (b *build) write() error {
	b.say("mount --make-rprivate /")
	b.say("mkdir %[1]s/stages && mount -t tmpfs tmpfs %[1]s/stages", b.scratch)
	for i := range b.stages {
		if err := b.stage(&b.stages[i]); err != nil {
			return fmt.Errorf("stage %q (FROM %s): %w", b.stages[i].Name, b.stages[i].BaseName, err)
		}
	}
	last := b.done[len(b.done)-1]
	for _, name := range b.copied {
		b.say("mkdir -p %s && cp -a %s %s", quote(b.out+"/root"+path.Dir(name)), quote(last.root+name), quote(b.out+"/root"+name))
	}
	return nil
}

func (b *build) find(name string) *stage {
	for _, s := range b.done {
		if s.name != "" && s.name == name {
			return s
		}
	}
	return nil
}

// stage writes the part of one stage. Its root is empty but for what it has of an earlier stage; the
// programs, libraries and settings of this machine are there to be read.
func (b *build) stage(from *instructions.Stage) error {
	s := &stage{name: from.Name, root: fmt.Sprintf("%s/stages/%d", b.scratch, len(b.done)), workdir: "/",
		args: map[string]string{}, config: config{Labels: map[string]string{}}}
	b.say("mkdir %s && mount -t tmpfs tmpfs %s", s.root, s.root)
	base := b.find(from.BaseName)
	switch {
	case base != nil:
		s.debian, s.workdir = base.debian, base.workdir
		for name, value := range base.args {
			s.args[name] = value
		}
		s.config.Env = slices.Clone(base.config.Env)
		b.say("cp -ax %s/. %s", base.root, s.root)
	case strings.HasPrefix(from.BaseName, "docker.io/library/golang:"):
	case strings.HasPrefix(from.BaseName, "docker.io/library/debian:"):
		s.debian = true
		b.say("mkdir -p %[1]s/var/lib/dpkg && cp %[2]s %[1]s/var/lib/dpkg/status", s.root, quote(b.status))
	default:
		return errors.New("this image is not known here")
	}
	if !s.debian {
		b.machine(s)
	}
	b.done, b.copied = append(b.done, s), nil
	for _, command := range from.Commands {
		if err := b.instruction(s, command); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
	}
	return nil
}

// machine puts this machine's programs below a root.
func (b *build) machine(s *stage) {
	for _, name := range []string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc"} {
		b.say(`if [ -L /%[1]s ]; then cp -a /%[1]s %[2]s/; elif [ -d /%[1]s ]; then mkdir -p %[2]s/%[1]s; mount --rbind -o ro /%[1]s %[2]s/%[1]s; fi`, name, s.root)
	}
	b.say("mkdir -p %[1]s/dev %[1]s/proc %[1]s/root && mkdir -p -m 1777 %[1]s/tmp && mount --rbind /dev %[1]s/dev && mount -t proc proc %[1]s/proc", s.root)
}

func (b *build) instruction(s *stage, command instructions.Command) error {
	lookup := shell.NewLex('\\')
	expand := func(word string) (string, error) {
		out, _, err := lookup.ProcessWord(word, environment(append(slices.Clone(s.config.Env), assignments(s.args)...)))
		return out, err
	}
	if c, ok := command.(instructions.SupportsSingleWordExpansion); ok {
		if err := c.Expand(expand); err != nil {
			return err
		}
	}
	switch c := command.(type) {
	case *instructions.WorkdirCommand:
		s.workdir = s.path(c.Path)
		b.say("mkdir -p %s", quote(s.root+s.workdir))
	case *instructions.ArgCommand:
		given := map[string]string{"TARGETOS": "linux", "TARGETARCH": b.arch, "VERSION": b.version}
		for _, arg := range c.Args {
			if value, ok := given[arg.Key]; ok {
				s.args[arg.Key] = value
			} else if arg.Value != nil {
				s.args[arg.Key] = *arg.Value
			}
		}
	case *instructions.EnvCommand:
		for _, pair := range c.Env {
			s.config.Env = append(s.config.Env, pair.Key+"="+pair.Value)
		}
	case *instructions.LabelCommand:
		for _, pair := range c.Labels {
			s.config.Labels[pair.Key] = pair.Value
		}
	case *instructions.EntrypointCommand:
		s.config.Entrypoint = c.CmdLine
	case *instructions.CopyCommand:
		return b.copy(s, c)
	case *instructions.RunCommand:
		return b.execute(s, c)
	default:
		return errors.New("this instruction is not known here")
	}
	return nil
}

// path within a stage.
func (s *stage) path(name string) string {
	if !path.IsAbs(name) {
		return path.Join(s.workdir, name)
	}
	return path.Clean(name)
}

// copy: of a directory, what is in it; wildcards have to match something.
func (b *build) copy(s *stage, c *instructions.CopyCommand) error {
	from := b.scratch + "/context"
	if c.From != "" {
		other := b.find(c.From)
		if other == nil {
			return fmt.Errorf("there is no stage %s", c.From)
		}
		from = other.root
	}
	to := s.path(c.DestPath)
	directory := strings.HasSuffix(c.DestPath, "/") || len(c.SourcePaths) > 1
	for _, source := range c.SourcePaths {
		// Unquoted, the shell expands wildcards; as the directory is known, nothing leaves it.
		at := from + path.Join("/", source)
		b.say("for f in %s; do [ -e \"$f\" ] || { echo \"%s: $f is not in the context, or not in the stage\" >&2; exit 1; }", at, c)
		b.say("if [ -d \"$f\" ]; then mkdir -p %[1]s; cp -a \"$f/.\" %[1]s; elif %[2]v; then mkdir -p %[1]s; cp -a \"$f\" %[1]s/; else mkdir -p %[3]s; cp -a \"$f\" %[1]s; fi; done",
			quote(s.root+to), directory, quote(s.root+path.Dir(to)))
	}
	b.copied = append(b.copied, to)
	return nil
}

// execute runs a command, with its caches being those of this machine's go.
func (b *build) execute(s *stage, c *instructions.RunCommand) error {
	if s.debian {
		return nil
	}
	caches := map[string]string{"/go/pkg/mod": "GOMODCACHE", "/root/.cache/go-build": "GOCACHE"}
	for _, m := range instructions.GetMounts(c) {
		variable, ok := caches[m.Target]
		if m.Type != instructions.MountTypeCache || !ok {
			return fmt.Errorf("the mount at %s is not known here", m.Target)
		}
		b.say("dir=$(go env %[1]s); mkdir -p \"$dir\" %[2]s; mountpoint -q %[2]s || mount --bind \"$dir\" %[2]s", variable, s.root+m.Target)
	}
	argv := c.CmdLine
	if c.PrependShell {
		argv = []string{"sh", "-c", strings.Join(c.CmdLine, " ")}
	}
	b.say("goroot=$(go env GOROOT); env %s GOPATH=/go GOCACHE=/root/.cache/go-build HOME=/root PATH=\"$goroot/bin:$PATH\" chroot %s sh -euc %s -- %s",
		quoteAll(append(slices.Clone(s.config.Env), assignments(s.args)...)), s.root, quote("cd "+quote(s.workdir)+`; exec "$@"`), quoteAll(argv))
	return nil
}

func quoteAll(words []string) string {
	var quoted []string
	for _, word := range words {
		quoted = append(quoted, quote(word))
	}
	return strings.Join(quoted, " ")
}

func assignments(args map[string]string) []string {
	var all []string
	for name, value := range args {
		all = append(all, name+"="+value)
	}
	return all
}

// environment is what words are expanded with.
type environment []string

func (e environment) Get(key string) (string, bool) {
	for _, one := range slices.Backward(e) {
		if name, value, _ := strings.Cut(one, "="); name == key {
			return value, true
		}
	}
	return "", false
}

func (e environment) Keys() []string {
	var keys []string
	for _, one := range e {
		name, _, _ := strings.Cut(one, "=")
		keys = append(keys, name)
	}
	return keys
}
