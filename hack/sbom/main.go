// Command sbom writes the bill of materials of the driver's image as SPDX 2.3 JSON: the
// Go modules that are in the binary, by what the compiler noted in it, and the Debian
// packages, by dpkg's list.
package main

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// SPDX 2.3, as far as it is needed.
type document struct {
	Version       string         `json:"spdxVersion"`
	License       string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      creation       `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Relationships []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID        string     `json:"SPDXID"`
	Name      string     `json:"name"`
	Version   string     `json:"versionInfo"`
	Download  string     `json:"downloadLocation"`
	Analyzed  bool       `json:"filesAnalyzed"`
	Concluded string     `json:"licenseConcluded"`
	Declared  string     `json:"licenseDeclared"`
	Copyright string     `json:"copyrightText"`
	Purpose   string     `json:"primaryPackagePurpose,omitempty"`
	Source    string     `json:"sourceInfo,omitempty"`
	Supplier  string     `json:"supplier,omitempty"`
	Checksums []checksum `json:"checksums,omitempty"`
	Refs      []ref      `json:"externalRefs,omitempty"`
}

type checksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type ref struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	Element string `json:"spdxElementId"`
	Related string `json:"relatedSpdxElement"`
	Type    string `json:"relationshipType"`
}

func main() {
	log.SetFlags(0)
	name := flag.String("name", "ashlar", "name of the image")
	version := flag.String("version", "dev", "version of the image")
	binary := flag.String("binary", "", "the driver")
	dpkg := flag.String("dpkg", "", "dpkg's status file; none: the binary alone")
	flag.Parse()
	packages, err := collect(*name, *version, *binary, *dpkg)
	if err != nil {
		log.Fatal("sbom: ", err)
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	if err := out.Encode(newDocument(*name, *version, packages)); err != nil {
		log.Fatal("sbom: ", err)
	}
}

// collect returns the image, the driver, and what they contain, in this order.
func collect(name, version, binary, dpkg string) ([]spdxPackage, error) {
	packages := []spdxPackage{{Name: name, Version: version, Purpose: "CONTAINER", Declared: "Apache-2.0"}}
	modules, err := goModules(binary, version)
	if err != nil {
		return nil, err
	}
	packages = append(packages, modules...)
	if dpkg != "" {
		debs, err := debianPackages(dpkg)
		if err != nil {
			return nil, err
		}
		packages = append(packages, debs...)
	}
	return packages, nil
}

// goModules returns the main module of a binary, and then those it is built of.
func goModules(binary, version string) ([]spdxPackage, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	bytes, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(bytes)
	all := []spdxPackage{{Name: info.Main.Path, Version: version, Purpose: "APPLICATION", Declared: "Apache-2.0",
		Checksums: []checksum{{"SHA256", hex.EncodeToString(sum[:])}}, Refs: purl("pkg:golang/%s@%s", info.Main.Path, version)},
		{Name: "stdlib", Version: info.GoVersion, Purpose: "LIBRARY", Declared: "BSD-3-Clause",
			Refs: purl("pkg:golang/stdlib@%s", strings.TrimPrefix(info.GoVersion, "go"))}}
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		one := spdxPackage{Name: module.Path, Version: module.Version, Purpose: "LIBRARY",
			Download: "https://proxy.golang.org/" + escape(module.Path) + "/@v/" + module.Version + ".zip",
			Refs:     purl("pkg:golang/%s@%s", module.Path, module.Version)}
		if hash, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(module.Sum, "h1:")); err == nil && module.Sum != "" {
			one.Source = "h1 " + hex.EncodeToString(hash) // a hash over the module's files, not over its archive
		}
		all = append(all, one)
	}
	return all, nil
}

// escape writes a module's path as the module proxy wants it: capitals as ! and a small letter.
func escape(path string) string {
	return regexp.MustCompile(`[A-Z]`).ReplaceAllStringFunc(path, func(c string) string { return "!" + strings.ToLower(c) })
}

func purl(format string, args ...any) []ref {
	return []ref{{"PACKAGE-MANAGER", "purl", fmt.Sprintf(format, args...)}}
}

func debianPackages(path string) ([]spdxPackage, error) {
	paragraphs, err := readControl(path)
	if err != nil {
		return nil, err
	}
	var all []spdxPackage
	for _, p := range paragraphs {
		if status := p["Status"]; status != "" && !strings.HasSuffix(status, " installed") {
			continue
		}
		source, _, _ := strings.Cut(cmp.Or(p["Source"], p["Package"]), " ")
		all = append(all, spdxPackage{Name: p["Package"], Version: p["Version"], Purpose: "OPERATING-SYSTEM",
			Source: "built from the source package " + source, Supplier: "Organization: Debian",
			Refs: purl("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", p["Package"],
				strings.NewReplacer("+", "%2B", ":", "%3A").Replace(p["Version"]), p["Architecture"])})
	}
	if len(all) == 0 {
		return nil, errors.New("no package in " + path)
	}
	slices.SortFunc(all, func(a, b spdxPackage) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// readControl reads paragraphs of "Field: value" lines (deb822), without the lines that go on.
func readControl(file string) ([]map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []map[string]string
	current := map[string]string{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			if len(current) > 0 {
				all = append(all, current)
			}
			current = map[string]string{}
		} else if field, value, ok := strings.Cut(line, ":"); ok && line[0] != ' ' && line[0] != '\t' {
			current[field] = strings.TrimSpace(value)
		}
	}
	if len(current) > 0 {
		all = append(all, current)
	}
	return all, lines.Err()
}

// newDocument fills in what all packages share: the image contains them all.
func newDocument(name, version string, packages []spdxPackage) document {
	clean := regexp.MustCompile(`[^a-zA-Z0-9.-]+`)
	d := document{Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Creation: creation{Created: created().UTC().Format(time.RFC3339), Creators: []string{"Tool: ashlar-sbom", "Organization: Ashlar"}}}
	seen := sha256.New()
	for i := range packages {
		p := &packages[i]
		p.ID = fmt.Sprintf("SPDXRef-%d-%s", i, clean.ReplaceAllString(p.Name, "-"))
		p.Download, p.Concluded = cmp.Or(p.Download, "NOASSERTION"), "NOASSERTION"
		p.Declared, p.Copyright = cmp.Or(p.Declared, "NOASSERTION"), "NOASSERTION"
		_, _ = fmt.Fprintln(seen, p.Name, p.Version, p.Checksums)
		if i == 0 {
			d.Relationships = append(d.Relationships, relationship{d.ID, p.ID, "DESCRIBES"})
		} else {
			d.Relationships = append(d.Relationships, relationship{packages[0].ID, p.ID, "CONTAINS"})
		}
	}
	d.Packages = packages
	d.Namespace = "https://github.com/ashlar-csi/ashlar/sbom/" + clean.ReplaceAllString(version, "-") + "/" + hex.EncodeToString(seen.Sum(nil)[:16])
	return d
}

// created is SOURCE_DATE_EPOCH where that is set, so that equal images have equal bills.
func created() time.Time {
	var seconds int64
	if n, err := fmt.Sscan(os.Getenv("SOURCE_DATE_EPOCH"), &seconds); n == 1 && err == nil {
		return time.Unix(seconds, 0)
	}
	return time.Now()
}
