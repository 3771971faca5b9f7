package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

// request is a kind of request: who asks for what.
type request struct{ who, what string }

func (r request) watch() bool { return strings.HasPrefix(r.what, "watch ") }

// auditLog is the API server's own list of the requests that it served.
type auditLog struct {
	path string
	at   int64 // what was read
}

// take counts the requests since the last call, by kind.
func (l *auditLog) take() (map[request]int, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	switch end, err := f.Seek(0, io.SeekEnd); {
	case err != nil:
		return nil, err
	case end < l.at:
		return nil, fmt.Errorf("%s has %d bytes, and %d were read: the API server has begun another one", l.path, end, l.at)
	}
	if _, err := f.Seek(l.at, io.SeekStart); err != nil {
		return nil, err
	}
	found := map[request]int{}
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return found, nil // what there is of a line is for the next call
		}
		if err != nil {
			return nil, err
		}
		l.at += int64(len(line))
		var e struct {
			Stage, Verb, UserAgent string
			User                   struct{ Username string }
			ObjectRef              *struct{ Resource, Subresource string }
			ResponseStatus         struct{ Code int }
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("%s: %w", l.path, err)
		}
		// A watch is counted when it begins, all else when it has ended.
		if begins := e.Stage == "ResponseStarted"; e.ObjectRef == nil || begins != (e.Verb == "watch") {
			continue
		}
		what := e.Verb + " " + e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			what += "/" + e.ObjectRef.Subresource
		}
		if e.ResponseStatus.Code >= 300 {
			what += fmt.Sprintf(" (%d)", e.ResponseStatus.Code)
		}
		who, _, _ := strings.Cut(e.UserAgent, "/")
		if controller, found := strings.CutPrefix(e.User.Username, "system:serviceaccount:kube-system:"); found {
			who += " (" + controller + ")"
		}
		found[request{who, what}]++
	}
}

// printRequests prints how often each kind of request was made for each of n things,
// without those that are rarer than one in twenty.
func printRequests(counts map[request]int, n float64, each string) {
	var rows [][]string
	total := 0.0
	for _, r := range slices.SortedFunc(maps.Keys(counts), func(a, b request) int {
		if c := strings.Compare(a.who, b.who); c != 0 {
			return c
		}
		return strings.Compare(a.what, b.what)
	}) {
		if rate := float64(counts[r]) / n; rate >= 0.05 {
			total += rate
			rows = append(rows, []string{r.who, r.what, fmt.Sprintf("%.2f", rate)})
		}
	}
	rows = append(rows, []string{"all", "", fmt.Sprintf("%.2f", total)})
	figures.Table([]string{"who", "request", each}, rows)
}
