package docs_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// programs are what pages may tell an operator to run: coreutils and bash's own, util-linux, procps and such that each node has; kubectl; those of
// the driver's image; and those of which the page says where to get them.
var programs = strings.Fields(`
	cat cp dd df du head ls mkdir mknod mv sort tail tar timeout truncate wc echo export set
	blkdiscard chroot dmesg findmnt fsfreeze fstrim fuser getfattr grep journalctl losetup lsblk lsof mount ps setfattr umount curl iostat
	kubectl crictl helm
	driver bash e2fsck dumpe2fs filefrag mkfs.ext4 mkfs.xfs resize2fs xfs_db xfs_growfs xfs_repair btrfs
	dmsetup lvchange lvconvert lvcreate lvextend lvremove lvrename lvs pvchange pvck pvcreate pvmove pvs
	vgcfgbackup vgcfgrestore vgchange vgextend vgreduce vgs vgscan
	cryptsetup ddrescue ip modprobe nvme smartctl ss`)

// subcommands are those of programs that are ours, or that pages use a part of.
var subcommands = map[string][]string{
	"kubectl ashlar": {"move", "scrub", "adopt", "capacity", "describe", "doctor", "pools", "replicas", "status", "volumes"},
	"kubectl": {"annotate", "apply", "ashlar", "auth", "cordon", "debug", "delete", "describe", "exec", "get", "logs", "patch", "port-forward", "rollout", "scale",
		"taint", "uncordon"},
	"driver": {"adopt", "capacity", "demo", "describe", "doctor", "manifests", "pools", "serve", "status", "volumes"},
}

// resources are the names of our objects in commands.
var resources = regexp.MustCompile(`\b(\w+)\.ashlar\.dev\b`)

// TestRunbooks: what the pages for an operator tell to paste is shell, its programs and their subcommands are there, and links lead somewhere.
func TestRunbooks(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(root, "docs/runbooks/*.md"))
	if err != nil || len(pages) < 15 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	tried := 0
	for _, page := range append(pages, filepath.Join(root, "docs/monitoring.md")) {
		t.Run(filepath.Base(page), func(t *testing.T) {
			text, err := os.ReadFile(page)
			if err != nil {
				t.Fatal(err)
			}
			links(t, page, string(text))
			for _, block := range blocks(string(text)) {
				tried += commands(t, block)
			}
			for _, span := range regexp.MustCompile("`(kubectl [^`]*)`").FindAllStringSubmatch(string(text), -1) {
				tried += commands(t, span[1])
			}
			if name := filepath.Base(page); name == "README.md" || name == "monitoring.md" {
				return
			}
			for _, part := range []string{"means", "bad"} {
				if !regexp.MustCompile(`(?m)^## .*` + part).Match(text) {
					t.Errorf("no section says what it means, or how bad it is (%q)", part)
				}
			}
			if !strings.Contains(string(text), "## Mended when") {
				t.Error("no section says when it is mended")
			}
		})
	}
	if tried < 150 {
		t.Errorf("%d commands found on the pages; are they of another form now?", tried)
	}
}

// badly is the section of a page that says how bad it is.
var badly = regexp.MustCompile(`(?s)\n## [^\n]*bad\n.*?(?:\n## |\z)`)

// TestUrgency: the section that says how bad it is has the severity of each alert that the page begins with.
func TestUrgency(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(root, "docs/runbooks/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		begins, _, _ := strings.Cut(string(text), "\n## ")
		for _, group := range readAlerts(t) {
			for _, r := range group.Rules {
				if r.Alert == "" || filepath.Base(page) == "README.md" || !regexp.MustCompile(r.Alert+`\b`).MatchString(begins) {
					continue
				}
				tried++
				if severity := r.Labels["severity"]; !strings.Contains(strings.ToLower(badly.FindString(string(text))), severity) {
					t.Errorf("%s says nothing of %s, which %s is", filepath.Base(page), severity, r.Alert)
				}
			}
		}
	}
	if tried < 20 {
		t.Errorf("%d alerts found on the pages; do they begin in another way now?", tried)
	}
}

var (
	// quoted is what somebody says, at some length. It has no code in it.
	quoted = regexp.MustCompile("\"([^\"`]{6,})\"")
	// others is what the pages quote of other programs, or of themselves.
	others = []string{"node(s) did not have enough free storage", "did not have enough free storage", "waiting for pod to be scheduled", "No space left on device", "No space",
		"Input/output error", "I/O error", "Read-only file system", "Filesystem has been shut down", "remounting read-only", "context deadline exceeded", "signal: killed",
		"btrfs_unfreeze", "errno=-4", "connection refused", "i/o timeout", "failed to search 'psk' key", "The disk is dead", "The filesystem stopped",
		"hybrid", "Required device-mapper target(s) not detected in your kernel"}
)

// TestQuotes: what pages quote of the driver, the driver says, word for word: somebody looks for it.
func TestQuotes(t *testing.T) {
	source := strings.ToLower(strings.ReplaceAll(goSource(t), `\"`, `"`))
	pages := []string{filepath.Join(root, "docs/install.md")}
	for _, folder := range []string{"use", "operate", "runbooks"} {
		found, err := filepath.Glob(filepath.Join(root, "docs", folder, "*.md"))
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	tried := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, "    ") { // commands
				continue
			}
			for _, found := range quoted.FindAllStringSubmatch(line, -1) {
				for part := range strings.SplitSeq(found[1], "...") { // names are left out
					tried++
					if part = strings.TrimSpace(part); !slices.Contains(others, part) && !strings.Contains(source, strings.ToLower(part)) {
						t.Errorf("%s quotes %q, which nothing says", filepath.Base(page), part)
					}
				}
			}
		}
	}
	if tried < 100 {
		t.Errorf("%d quotes found on the pages; are they of another form now?", tried)
	}
}

// deletes is a command that deletes a claim, before one that deletes a pod.
var deletes = regexp.MustCompile(`kubectl delete pvc ([^\n]*?)(?:&&|\n) *kubectl delete pod`)

// TestClaimsOfPods: who deletes a claim and then its pod does not wait for the claim, which the pod holds.
func TestClaimsOfPods(t *testing.T) {
	tried := 0
	for _, pattern := range []string{"docs/operate/*.md", "docs/runbooks/*.md", "docs/use/*.md"} {
		for _, found := range deletes.FindAllStringSubmatch(file(t, pattern), -1) {
			if tried++; !strings.Contains(found[1], "--wait=false") {
				t.Errorf("it waits for ever: %s", found[0])
			}
		}
	}
	if tried == 0 {
		t.Error("no page deletes a claim and then its pod; does it say so in another way now?")
	}
}

var (
	// container is a container that a command of kubectl names.
	container = regexp.MustCompile("kubectl[^\n`]* -c ([a-z][-a-z]*)\\b")
	// deployed is a container of the manifests.
	deployed = regexp.MustCompile(`(?m)^        - name: (\S+)\n          image:`)
	// oneLog is a log of one pod of several, which kubectl chooses: one that is ready, so not the one that somebody looks for.
	oneLog = regexp.MustCompile("kubectl[^\n`]* logs (deployment|daemonset)/[^\n`]*")
)

// TestLogs: commands name containers that the manifests have, and ask for the logs of all pods of a kind, or of the one that is meant.
func TestLogs(t *testing.T) {
	var have []string
	for _, found := range deployed.FindAllStringSubmatch(file(t, "deploy/kubernetes/*.yaml"), -1) {
		have = append(have, found[1])
	}
	tried := 0
	for _, pattern := range []string{"docs/operate/*.md", "docs/runbooks/*.md", "docs/use/*.md", "docs/*.md"} {
		text := file(t, pattern)
		for _, found := range container.FindAllStringSubmatch(text, -1) {
			if tried++; !slices.Contains(have, found[1]) {
				t.Errorf("there is no container %s: %s", found[1], found[0])
			}
		}
		for _, found := range oneLog.FindAllString(text, -1) {
			t.Errorf("it is the log of some pod: %s", found)
		}
	}
	if tried < 10 || len(have) < 8 {
		t.Errorf("%d commands name a container, and the manifests have %v; are they of another form now?", tried, have)
	}
}

// upgrades is a command of Helm that changes a release, over several lines.
var upgrades = regexp.MustCompile("helm upgrade (?:[^\n`]*\\\\\n)*[^\n`]*")

// TestValuesKept: who changes one value of the chart keeps the others. Helm takes --set and -f alone for all values that there are to be.
func TestValuesKept(t *testing.T) {
	tried := 0
	for _, command := range upgrades.FindAllString(file(t, "docs/*.md", "docs/operate/*.md", "docs/use/*.md", "docs/runbooks/*.md", "README.md", "deploy/charts/ashlar/*.md"), -1) {
		if !strings.Contains(command, " --set ") && !strings.Contains(command, " -f ") {
			continue
		}
		if tried++; !strings.Contains(command, " --reset-then-reuse-values") {
			t.Errorf("it drops all other values: %s", command)
		}
	}
	if tried < 4 {
		t.Errorf("%d commands give values; are they of another form now?", tried)
	}
}

// goSource is all code that messages are in.
func goSource(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, part := range []string{"pkg", "internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, part), func(name string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			text, err := os.ReadFile(name)
			all.Write(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}

// link is [text](target), which is no address.
var link = regexp.MustCompile(`\]\(([^):\s]+)\)`)

func links(t *testing.T, page, text string) {
	t.Helper()
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		file, anchor, _ := strings.Cut(m[1], "#")
		target := page
		if file != "" {
			target = filepath.Join(filepath.Dir(page), file)
		}
		info, err := os.Stat(target)
		if err != nil {
			t.Errorf("link %s: %v", m[1], err)
			continue
		}
		if anchor == "" || info.IsDir() {
			continue
		}
		there, err := os.ReadFile(target)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(anchors(string(there)), anchor) {
			t.Errorf("link %s: the page has no such section", m[1])
		}
	}
}

// anchors are GitHub's names of the sections of a page.
func anchors(text string) (found []string) {
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		found = append(found, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, m[1]))
	}
	return found
}

// blocks returns the blocks of a page that are commands: those that are indented, and those within ```sh.
func blocks(text string) (found []string) {
	var prose strings.Builder
	fence, block := "", ""
	for line := range strings.Lines(text) {
		opens := strings.HasPrefix(strings.TrimSpace(line), "```")
		switch {
		case opens && fence == "":
			fence, block = strings.TrimSpace(line), ""
		case opens:
			if fence == "```sh" {
				found = append(found, block)
			}
			fence = ""
		case fence != "":
			block += line
		default:
			prose.WriteString(line)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^\n((?: {4,}.*\n)+)`).FindAllStringSubmatch(prose.String(), -1) {
		found = append(found, m[1])
	}
	return found
}

// commands checks a block of shell, and returns how many commands it has.
func commands(t *testing.T, block string) (tried int) {
	t.Helper()
	check := exec.Command("bash", "-n")
	check.Stdin = strings.NewReader(block)
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("this is no shell: %s\n%s", block, out)
		return 0
	}
	for _, m := range resources.FindAllStringSubmatch(block, -1) {
		if m[1] != "" && !slices.Contains([]string{"volumes", "snapshots", "pools", "replicatedvolumes", "csi"}, m[1]) {
			t.Errorf("there are no objects %s.ashlar.dev: %s", m[1], block)
		}
	}
	for _, words := range simple(block) {
		tried++
		program := filepath.Base(words[0])
		if !slices.Contains(programs, program) {
			t.Errorf("%s is none of the programs that pages use: %v", program, words)
			continue
		}
		for _, name := range []string{program, program + " " + second(words)} {
			known, rest := subcommands[name], words[1:]
			if len(known) == 0 {
				continue
			}
			if name != program {
				rest = words[2:]
			}
			if sub := subcommand(rest); sub != "" && !slices.Contains(known, sub) {
				t.Errorf("%s has no %s: %v", name, sub, words)
			}
		}
	}
	return tried
}

func second(words []string) string {
	if len(words) > 1 {
		return words[1]
	}
	return ""
}

// subcommand is the first word that is no flag, nor the value of -n.
func subcommand(words []string) string {
	for i, w := range words {
		if !strings.HasPrefix(w, "-") && (i == 0 || words[i-1] != "-n") {
			return w
		}
	}
	return ""
}

// assignment begins a line that sets variables.
var assignment = regexp.MustCompile(`^\w+=`)

// simple returns the simple commands of a block, in words: without comments, what is quoted, redirections and assignments.
func simple(block string) (found [][]string) {
	block = regexp.MustCompile(`(?s)'[^']*'`).ReplaceAllString(block, "Q")
	block = regexp.MustCompile(`\$\(`).ReplaceAllString(block, " ; ")
	block = regexp.MustCompile(`(?s)"(\\.|[^"\\])*"`).ReplaceAllString(block, "Q")
	block = regexp.MustCompile(`(?m)(^|\s)#.*$`).ReplaceAllString(block, "")
	block = regexp.MustCompile(`\\\n`).ReplaceAllString(block, " ")
	for _, part := range regexp.MustCompile(`\n|;|&&|\|\|?|\)`).Split(block, -1) {
		words := strings.Fields(part)
		for len(words) > 0 && assignment.MatchString(words[0]) {
			words = words[1:]
		}
		if len(words) > 0 {
			found = append(found, words)
		}
	}
	return found
}
