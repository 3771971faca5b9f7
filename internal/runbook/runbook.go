// Package runbook knows which page of docs/runbooks says what to do about a problem.
package runbook

// base is where the pages are read.
const base = "https://github.com/ashlar-csi/ashlar/blob/main/docs/runbooks/"

// pages are the pages, by the reason of a problem.
var pages = map[string]string{}

// URL returns the address of the page for the reason of a problem (blockdev.Problem.Reason, or one of a failure); of the
// list of all pages if there is none.
func URL(reason string) string {
	if page := pages[reason]; page != "" {
		return base + page + ".md"
	}
	return base + "README.md"
}
