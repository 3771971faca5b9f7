//go:build e2e

package nodes

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/html"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/monitoring/prometheus"
)

// What follows is what a person has who looks after the cluster: the documentation, the commands in it, the page, and Prometheus.

// tree is the top of the source.
func tree() string { return filepath.Join(filepath.Dir(os.Getenv("CLUSTER")), "../..") }

// book is a page of the documentation.
type book struct {
	*cluster
	path, text string
}

const address = "https://github.com/ashlar-csi/ashlar/blob/main/"

// open opens a page, by its path or the address that something shows.
func (c *cluster) open(path string) book {
	c.Helper()
	path = strings.TrimPrefix(path, address)
	text, err := os.ReadFile(filepath.Join(tree(), path))
	check.OK(c, err)
	return book{c, path, string(text)}
}

// leadsTo reports whether a page is the other one, or says in one sentence that some reason is on that.
func (b book) leadsTo(other string, reasons []string) bool {
	if b.path == other {
		return true
	}
	for sentence := range strings.SplitSeq(strings.ReplaceAll(b.text, ".md", "/md"), ".") {
		link := "(" + strings.ReplaceAll(filepath.Base(other), ".md", "/md") + ")"
		if strings.Contains(sentence, link) && slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(sentence, r) }) {
			return true
		}
	}
	return false
}

// command returns one of the page's, as somebody pastes it who has set the names in capitals. It has to be there word for word.
func (b book) command(line string, names ...string) string {
	b.Helper()
	for one := range strings.Lines(b.text) {
		one, _, _ = strings.Cut(strings.TrimSpace(one), "  #")
		if one = strings.TrimRight(one, " "); one == line {
			return strings.NewReplacer(names...).Replace(line)
		}
	}
	b.Fatalf("%s does not say: %s", b.path, line)
	return ""
}

// shell runs commands where somebody has kubectl, after those by which docs/runbooks/README.md sets the names of a node.
func (c *cluster) shell(node string, commands ...string) string {
	c.Helper()
	used := c.open("docs/runbooks/README.md")
	names := []string{used.command("NODE=worker-1 POOL=default", "worker-1", node),
		used.command(`POD=$(kubectl -n ashlar-system get pods -l app.kubernetes.io/component=node --field-selector spec.nodeName="$NODE" -o name)`)}
	c.Logf("%s$ %s", node, strings.Join(commands, "; "))
	return c.run(strings.Join(append(names, commands...), "\n"), "bash", "-euo", "pipefail")
}

// empty runs a command that ends with grep until it prints nothing.
func (c *cluster) empty(what, command string) {
	c.Helper()
	c.eventually(what, func() error {
		left, err := c.try(command+" || true", "bash", "-eu")
		if left != "" {
			err = errors.Join(err, errors.New(left))
		}
		return err
	})
}

// root runs commands on a node, as root.
func (c *cluster) root(node string, commands ...string) string {
	c.Helper()
	c.Logf("%s# %s", node, strings.Join(commands, "; "))
	return c.run(strings.Join(commands, "\n"), os.Getenv("CLUSTER"), "on", node, "bash", "-euo", "pipefail")
}

// mount has a node's disk mounted by that command. The disk is a file, and the loop device that it gets may be one that somebody made
// read-only, which stays so for its next file; then it is mounted again, from another one or that one as it should be.
func (c *cluster) mount(node, command string) {
	c.Helper()
	c.Logf("%s# %s", node, command)
	c.run(`for try in {1..20}; do
		blockdev --setrw "$(losetup -f)"
		`+command+`
		findmnt -rno OPTIONS /var/lib/ashlar | grep -q ^rw && exit
		umount -l /var/lib/ashlar
		sleep 0.2
	done
	exit 1`, os.Getenv("CLUSTER"), "on", node, "bash", "-euo", "pipefail")
}

// plugin has "kubectl ashlar" be what is built from this source.
func (c *cluster) plugin() {
	c.Helper()
	dir := c.TempDir()
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "kubectl-ashlar"), "./cmd/kubectl-ashlar")
	build.Dir = tree()
	out, err := build.CombinedOutput()
	if err != nil {
		c.Fatalf("%v: %s", err, out)
	}
	c.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// page is the controller's, as docs/page.md leads to it.
func (c *cluster) page() string {
	c.Helper()
	forward := exec.Command("bash", "-c", "exec "+strings.Replace(c.open("docs/page.md").command("kubectl -n ashlar-system port-forward service/ashlar-page 9820"), " 9820", " :9820", 1))
	forward.Stderr = os.Stderr
	forward.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := forward.StdoutPipe()
	check.OK(c, err)
	check.OK(c, forward.Start())
	c.Cleanup(func() {
		_ = forward.Process.Kill()
		_ = forward.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	at := regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(line)
	if at == "" {
		c.Fatalf("kubectl port-forward says %q, %v", line, err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }() // it ends with the process
	return "http://" + at + "/"
}

// fetch is what the page has, as a program gets it.
func fetch(ctx context.Context, page string) (*html.Node, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, page, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", page, answer.Status)
	}
	return html.Parse(answer.Body)
}

// browse is what a browser makes of it.
func (c *cluster) browse(page string) (shown *html.Node, err error) {
	home, err := os.MkdirTemp("", "chromium")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(home)) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	browser := exec.CommandContext(ctx, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run", "--user-data-dir="+home, "--dump-dom", page)
	browser.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home)
	var said strings.Builder
	browser.Stderr = &said
	out, err := browser.Output()
	if err != nil {
		return nil, fmt.Errorf("chromium (hack/install-tools.sh page): %w: %s", err, said.String())
	}
	return html.Parse(strings.NewReader(string(out)))
}

// written is the text below a node of HTML.
func written(n *html.Node) string {
	var out strings.Builder
	for one := range n.Descendants() {
		if one.Type == html.TextNode {
			out.WriteString(one.Data + " ")
		}
	}
	return strings.Join(strings.Fields(out.String()), " ")
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// wrong are the problems that a page lists first: what is written of each, and where "What to do" leads.
func wrong(page *html.Node) map[string]string {
	found := map[string]string{}
	for list := range page.Descendants() {
		if list.Data != "ul" || attribute(list, "class") != "wrong" {
			continue
		}
		for item := range list.ChildNodes() {
			for link := range item.Descendants() {
				if link.Data == "a" && strings.HasPrefix(written(link), "What to do") {
					found[written(item)] = attribute(link, "href")
				}
			}
		}
	}
	return found
}

// monitored is a Prometheus that scrapes the driver's pods, as docs/monitoring.md says.
type monitored struct {
	*cluster
	*prometheus.Server
	targets string // a file
}

// monitor starts one, with the rules that we ship. impatient: alerts fire at once, and end at once.
func (c *cluster) monitor(impatient bool) *monitored {
	c.Helper()
	dir := c.TempDir()
	rules, err := os.ReadFile(filepath.Join(tree(), "deploy/monitoring/rules.yaml"))
	check.OK(c, err)
	if impatient {
		rules = regexp.MustCompile(`(?m)^( +(?:for|keep_firing_for)): .*$`).ReplaceAll(rules, []byte("$1: 1s"))
	}
	check.OK(c, os.WriteFile(dir+"/rules.yaml", rules, 0o600))
	m := &monitored{cluster: c, targets: dir + "/targets.json"}
	m.discover()
	m.Server = prometheus.Start(c, filepath.Join(tree(), "bin"), dir, drivertest.FreeAddresses(c, 1)[0], fmt.Sprintf(`
global: {scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 2s}
rule_files: [%q]
scrape_configs:
  - job_name: ashlar
    honor_labels: true
    file_sd_configs: [{files: [%q], refresh_interval: 2s}]
`, dir+"/rules.yaml", m.targets))
	return m
}

// discover does what Prometheus' own discovery does by the configuration of docs/monitoring.md, as Debian's Prometheus does not know
// Kubernetes: each port named metrics of a pod of the driver, with its node if it is of one.
func (m *monitored) discover() {
	m.Helper()
	var pods corev1.PodList
	check.OK(m, m.kube.List(context.Background(), &pods, client.InNamespace("ashlar-system")))
	type target struct {
		Targets []string          `json:"targets"`
		Labels  map[string]string `json:"labels"`
	}
	targets := []target{}
	for _, p := range pods.Items {
		labels := map[string]string{}
		if p.Labels["app.kubernetes.io/component"] == "node" {
			labels["node"] = p.Spec.NodeName
		}
		for _, container := range p.Spec.Containers {
			for _, port := range container.Ports {
				if port.Name == "metrics" && p.Status.PodIP != "" && p.DeletionTimestamp == nil {
					targets = append(targets, target{[]string{fmt.Sprintf("%s:%d", p.Status.PodIP, port.ContainerPort)}, labels})
				}
			}
		}
	}
	text, err := json.Marshal(targets)
	check.OK(m, err)
	check.OK(m, os.WriteFile(m.targets+".new", text, 0o600))
	check.OK(m, os.Rename(m.targets+".new", m.targets))
}
